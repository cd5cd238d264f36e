"""Who signed a publication: what a reader's key accepts, and what no key may."""

import json
from base64 import b64decode, b64encode
from functools import partial
from urllib.parse import quote

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from parts.publication import fetch, in_toto, layout, publish, signature
from pipeline.recheck import outputs
from pipeline.stage.keys import PROJECT
from pipeline.stage.untrusted_files import walk
from tests.parts.publication.published_run import LIMITS, print_of
from tests.pipeline.sources.options import refusal
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub

refused = partial(refusal, signature.check)
FILES = {"a.txt": "1" * 64, "proof/b.txt": "2" * 64}
# By `model_signing sign key` of model-signing 1.1.1, of these two files with "a\n" and "b\n".
FOREIGN = PROJECT / "tests" / "fixtures" / "model_signing"
FOREIGN_FILES = {
    "a.txt": "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7",
    "proof/b.txt": "0263829989b6fd954f72baaf2fc64bc2e2f01d692d4de72986ea808f6e99813f",
}


def write_keys(folder, curve=None, name="key"):
    """Files of a private and a public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    public.write_bytes(pem)
    return private, public


def sign(folder, key):
    """Signs a publication."""
    listed = read_json(folder / layout.MANIFEST)["files"]
    files = {name: file["sha256"] for name, file in listed.items()}
    files[layout.MANIFEST] = sha256_file(folder / layout.MANIFEST)
    (folder / layout.SIGNATURE).write_bytes(signature.sign(files, folder.name, key))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_what_a_key_signed_is_proven_to_its_reader_and_stated_to_others(curve, tmp_path):
    private, public = write_keys(tmp_path, curve)
    found = signature.sign(FILES, "folder", private)
    claim = signature.check(found, FILES, public)
    assert (claim.kind, claim.values["key"] in claim.text) == ("proven", True)
    without = signature.check(found, FILES, None)
    assert (without.kind, without.values) == ("stated", claim.values)
    nobody = signature.check(None, FILES, None)
    assert (nobody.kind, nobody.values) == ("stated", {"key": None})


def test_a_signature_by_the_library_whose_format_it_is_is_read(tmp_path):
    found = (FOREIGN / "model.sig").read_bytes()
    claim = signature.check(found, FOREIGN_FILES, FOREIGN / "key.pub")
    assert claim.kind == "proven"
    assert "expected the key" in refused(found, FOREIGN_FILES, write_keys(tmp_path)[1])


@pytest.mark.parametrize("with_key", [True, False])
def test_what_was_not_signed_is_refused_with_and_without_a_key(with_key, tmp_path):
    private, public = write_keys(tmp_path)
    key = public if with_key else None
    found = signature.sign(FILES, "folder", private)
    for files, named in (
        (FILES | {"a.txt": "3" * 64}, "a.txt is SHA-256 111111111111"),
        (FILES | {"c.txt": "3" * 64}, "c.txt is no file"),
        ({"a.txt": FILES["a.txt"]}, "proof/b.txt is SHA-256 222222222222"),
    ):
        assert named in refused(found, files, key)


def test_an_altered_a_foreign_and_a_missing_signature_are_refused(tmp_path):
    private, public = write_keys(tmp_path)
    stranger, _ = write_keys(tmp_path, name="stranger")
    assert "no such file" in refused(None, FILES, public)
    said = json.loads(signature.sign(FILES, "folder", stranger))
    assert "expected the key" in refused(json.dumps(said).encode(), FILES, public)
    # the stranger says that it was this key
    own = json.loads(signature.sign(FILES, "folder", private))
    said["verificationMaterial"] = own["verificationMaterial"]
    assert "the signature does not match" in refused(json.dumps(said).encode(), FILES, public)
    # and signs what the author signed, of other files
    other = FILES | {"a.txt": "3" * 64}
    envelope = json.loads(signature.sign(other, "folder", stranger))["dsseEnvelope"]
    own["dsseEnvelope"]["payload"] = envelope["payload"]
    assert "the signature does not match" in refused(json.dumps(own).encode(), other, public)


def test_a_file_that_is_no_signature_is_one_line(tmp_path):
    private, public = write_keys(tmp_path)
    said = signature.sign(FILES, "folder", private)
    zeros = {"sig": b64encode(bytes.fromhex("3006020100020100")).decode()}  # r and s are 0
    of_another = json.loads(signature.seal(b"{}", private))["dsseEnvelope"]["signatures"]

    def enveloped(**content):
        return changed(lambda document: document["dsseEnvelope"].update(content))

    def changed(change):
        document = json.loads(said)
        change(document)
        return json.dumps(document).encode()

    def payload(change):
        def inner(document):
            statement = json.loads(b64decode(document["dsseEnvelope"]["payload"]))
            change(statement)
            content = b64encode(json.dumps(statement).encode()).decode()
            document["dsseEnvelope"]["payload"] = content

        return changed(inner)

    for found, key, named in (
        (b"{", None, "expected JSON"),
        (changed(lambda d: d.update(mediaType="x")), None, "mediaType"),
        (enveloped(payload="?"), None, "expected base64"),
        (enveloped(payloadType="text/plain"), None, "payloadType"),
        (enveloped(signatures=[]), public, "signatures"),
        (enveloped(signatures=[zeros] * 2), public, "signatures"),
        (enveloped(signatures=[zeros]), public, "the signature does not match"),
        (enveloped(signatures=of_another), public, "the signature does not match"),
        (payload(lambda s: s.update(predicateType="x")), None, "predicateType"),
        (payload(lambda s: s["predicate"]["resources"].append(s["predicate"]["resources"][0])),)
        + (None, "a.txt appears twice"),
    ):
        assert named in refused(found, FILES, key)


def test_a_key_that_cannot_sign_or_verify_is_named_with_what_was_expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k")  # a short path, which a message shows whole
    private, public = write_keys(folder)
    other = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    other_curve = ec.generate_private_key(ec.SECP256K1())
    secret = BestAvailableEncryption(b"word")
    pkcs8 = PrivateFormat.PKCS8
    keys = {
        "rsa.pem": other.private_bytes(Encoding.PEM, pkcs8, NoEncryption()),
        "curve.pem": other_curve.private_bytes(Encoding.PEM, pkcs8, NoEncryption()),
        "secret.pem": other_curve.private_bytes(Encoding.PEM, pkcs8, secret),
        "text.pem": b"hello",
        "public.pem": public.read_bytes(),
    }
    for name, content in keys.items():
        (folder / name).write_bytes(content)
    for name in (*keys, "nothere.pem"):
        with pytest.raises(LockstepError, match=f"{name}: .* P-256") as caught:
            signature.check_private(folder / name)
        assert "PRIVATE" not in str(caught.value)
    small = ed25519.Ed25519PublicKey.from_public_bytes(b"\1" + bytes(31))  # of order 1
    pem = small.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "small.pub").write_bytes(pem)
    for key in (private, folder / "small.pub"):
        assert "not a public key" in refused(None, FILES, key)


# ---- Of a publication ----


@pytest.mark.long
def test_a_signature_is_fetched_wherever_the_publication_lies(folder, tmp_path, monkeypatch):
    private, public = write_keys(tmp_path)
    _, strange = write_keys(tmp_path, name="strange")
    sign(folder, private)
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        files = {name: (folder / name).read_bytes() for name, _ in walk(folder)}
        commit = hub.commit(files | {".gitattributes": b""})
        found = fetch.find(REPO, tmp_path / "store", LIMITS)
        elsewhere = f"?repository_url={quote(hub.address, safe='')}"
        assert found.uri == f"pkg:huggingface/{REPO}@{commit}{elsewhere}"
        stated, values = in_toto.claims(found)[1][1], in_toto.claims(found)[0].values
        names = ("model.safetensors", outputs.RUN, layout.MANIFEST)
        named = {name: sha256_file(folder / name) for name in names}
        assert (stated, values["sha256"]) == ("stated", named)
        claim = signature.check(found.signature, found.digests, public)
        assert claim.kind == "proven"
    with Files().serving() as server:
        server.add(folder)
        asked = [server.address, "--root", tmp_path / "r", "--key", strange]
        status, said = print_of("verify", *asked)
        assert status == 1 and "model.sig: signed by the key" in said
        assert {path for _, path, _ in server.seen} == {f"/{layout.MANIFEST}", "/model.sig"}


@pytest.mark.long
def test_publish_signs_what_it_writes_and_writes_nothing_with_a_key_that_cannot_sign(
    published, tmp_path
):
    (private, public), out = write_keys(tmp_path), tmp_path / "out"
    with pytest.raises(LockstepError, match="not a private key"):
        publish.write(out, published.run_file, published.root, 1, None, public)
    assert not out.exists()
    publish.write(out, published.run_file, published.root, 1, None, private)
    found = fetch.find(str(out), tmp_path, LIMITS)
    assert signature.check(found.signature, found.digests, public).kind == "proven"
