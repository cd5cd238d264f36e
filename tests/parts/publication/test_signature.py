"""Who signed a publication: what a reader's key accepts, and what no key may."""

import json
from base64 import b64decode, b64encode
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from lockstep.errors import LockstepError
from parts.publication import signature
from pipeline.stage.keys import PROJECT
from tests.pipeline.sources.options import refusal

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
        (changed(lambda d: d["dsseEnvelope"].update(payload="?")), None, "expected base64"),
        (changed(lambda d: d["dsseEnvelope"].update(signatures=[])), public, "signatures"),
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
    assert "not a public key" in refused(None, FILES, private)
