"""What a server is asked after https://."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipeline.net import limits, remote, web
from tests.servers import misbehaviour as wrong
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour


@pytest.fixture
def certified(tmp_path, monkeypatch):
    """The TLS of a server at 127.0.0.1, whose certificate is believed here."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = tmp_path / "here.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form)
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


def test_no_redirect_leads_from_https_to_http(certified):
    network = limits.NetSettings(attempts=1, stall_seconds=5.0)
    inner, outer = Files(files={"a": b"aa"}), Files(files={"a": b"aa"}, tls=certified)
    with inner.serving(), outer.serving():
        request = remote.resolve_web(outer.url("a"))
        assert request.url.startswith("https://")
        assert web.head(request, network).size == 2
        outer.faults.append(Misbehaviour(wrong.redirected(inner.url("a")), where="^(GET|HEAD) "))
        with pytest.raises(limits.NotFetchedError, match="redirects to http://"):
            web.head(request, network)
        assert inner.seen == []
