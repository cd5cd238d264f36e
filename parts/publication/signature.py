"""The signature of a publication: who published it, for whoever has their public key.

It is the file `model.sig` of OpenSSF's model-signing 1.x: a sigstore bundle around a DSSE envelope,
whose payload is an in-toto statement with the SHA-256 of every file. So `model_signing verify key`
checks ours, and we check what `model_signing sign key` or its PKCS #11 made. That library itself is
not used: it can only hash a whole folder again, where a reader has a part of it, and its release
1.1.1 imports a package that it does not install. Docs: docs/reference/publication.md.
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from parts.publication.layout import SIGNATURE
from pipeline.recheck.claim import PublicClaim

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
# What the library leaves out of a folder, unless it is told otherwise.
IGNORED = (SIGNATURE, ".git", ".github", ".gitignore", ".gitattributes")
KEY_FORM = "in PEM, without a password, of the curve P-256, P-384 or P-521"
CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
MOST_KEY_BYTES = 2**16


# ---- The file ----


class _Part(Table, extra="ignore"):
    """A part of the signature's file; what this release does not know is ignored."""


class KeyHint(_Part):
    """Which key made the signature: the SHA-256 of the public one in PEM."""

    hint: Hash


class KeyMaterial(_Part):
    """The key that verifies the signature."""

    publicKey: KeyHint


class EnvelopeSignature(_Part):
    """One signature, in base64."""

    sig: str


class Envelope(_Part):
    """DSSE: the signed bytes, in base64, and the signature."""

    payload: str
    payloadType: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[tuple[EnvelopeSignature, ...], Field(min_length=1, max_length=1)]


class SigstoreBundle(_Part):
    """The signature's file, model.sig."""

    mediaType: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verificationMaterial: KeyMaterial
    dsseEnvelope: Envelope


class SignedFile(_Part):
    """A file that was signed, by its name in the folder."""

    name: str
    algorithm: Literal["sha256"]
    digest: Hash


class SignedFolder(_Part):
    """All files that were signed."""

    resources: tuple[SignedFile, ...]


class SignedStatement(_Part):
    """The payload of a signature."""

    kind: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicateType: Literal["https://model_signing/signature/v1.0"]
    predicate: SignedFolder


# ---- Sign and check ----


def check_private(key: Path) -> None:
    """Check that a file has a private key for a signature, and that the library is installed."""
    _key(key, "private")


def sign(digests: dict[str, str], name: str, key: Path) -> bytes:
    """Return a publication's signature `model.sig` for files of the folder `name`, by SHA-256."""
    resources = [
        {"name": file, "algorithm": "sha256", "digest": digests[file]} for file in sorted(digests)
    ]
    # the SHA-256 over all digests, in their order
    root = hashlib.sha256(bytes.fromhex("".join(r["digest"] for r in resources))).hexdigest()
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE,
        "predicate": {
            "resources": resources,
            "serialization": serialization | {"ignore_paths": [*IGNORED]},
        },
    }
    return seal(json.dumps(statement, indent=1).encode(), key)


def seal(payload: bytes, key: Path) -> bytes:
    """Return a sigstore bundle around an in-toto statement, signed with a private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    private = _key(key, "private")
    signature = private.sign(_signed_bytes(payload), ec.ECDSA(_hash_of(private.curve)))
    material = {"publicKey": {"hint": fingerprint(private.public_key())}, "tlogEntries": []}
    envelope = {
        "payload": b64encode(payload).decode(),
        "payloadType": PAYLOAD,
        "signatures": [{"sig": b64encode(signature).decode(), "keyid": ""}],
    }
    bundle = {"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope}
    return json.dumps(bundle).encode() + b"\n"


def unseal(content: bytes, keys: Collection[Path], where: str) -> tuple[bytes, str]:
    """Return the statement in a sigstore bundle, and the key that is said to have signed it.

    One of the public `keys` has to have signed it, if there are any; errors call it `where`.
    """
    bundle = validate_json(SigstoreBundle, content, where)
    signer = bundle.verificationMaterial.publicKey.hint
    payload = _decoded(bundle.dsseEnvelope.payload, where)
    public = {fingerprint(key): key for key in (_key(path, "public") for path in keys)}
    if public and signer not in public:
        expected = " or ".join(f"sha256:{sha256}" for sha256 in public)
        raise LockstepError(
            f"{where}: signed by the key sha256:{signer}, expected the key {expected}"
        )
    if public:
        found = _decoded(bundle.dsseEnvelope.signatures[0].sig, where)
        _verify(public[signer], found, payload, where)
    return payload, signer


def check(signature: bytes | None, digests: dict[str, str], key: Path | None) -> PublicClaim:
    """Return the claim on who published the files, the list too, by `digests`, their SHA-256.

    `signature` is the content of `model.sig`, if there is one. Without the public `key` that a
    reader expects it is compared with the files, and who signed it is stated.

    Raises:
      LockstepError: There is a signature of other files, or none by the reader's key.
    """
    if signature is None and key is not None:
        expected = fingerprint(_key(key, "public"))
        raise LockstepError(
            f"{SIGNATURE}: no such file, expected a signature by the key sha256:{expected}"
        )
    if signature is None:
        return PublicClaim("signature", "stated", "who published it", {"key": None})
    payload, signer = unseal(signature, [] if key is None else [key], SIGNATURE)
    _compare(validate_json(SignedStatement, payload, SIGNATURE), digests)
    if key is None:
        text = f"that the holder of the key sha256:{signer} signed it"
        return PublicClaim("signature", "stated", text, {"key": signer})
    text = f"signed by the holder of the key sha256:{signer}"
    return PublicClaim("signature", "proven", text, {"key": signer})


def fingerprint(public: "ec.EllipticCurvePublicKey") -> str:
    """Return the SHA-256 of a signature's public key in PEM, as `sha256sum` prints it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def _verify(
    public: "ec.EllipticCurvePublicKey", signature: bytes, payload: bytes, where: str
) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public.verify(signature, _signed_bytes(payload), ec.ECDSA(_hash_of(public.curve)))
    except InvalidSignature:
        raise LockstepError(
            f"{where}: the signature does not match the content and the key "
            f"sha256:{fingerprint(public)}, expected one that does"
        ) from None


def _compare(statement: SignedStatement, digests: dict[str, str]) -> None:
    """Check that the signed files are the published ones."""
    signed: dict[str, str] = {}
    for file in statement.predicate.resources:
        if file.name in signed:
            raise LockstepError(f"{SIGNATURE}: {brief(file.name)} appears twice, expected once")
        signed[file.name] = file.digest
    for name in sorted(signed.keys() | digests.keys()):
        sha256, claimed = digests.get(name), signed.get(name)
        if sha256 != claimed:
            raise LockstepError(
                f"{SIGNATURE}: {brief(name)} is {_digest(claimed)} in what was signed, expected "
                f"{_digest(sha256)} as it is published"
            )


def _digest(sha256: str | None) -> str:
    return "no file" if sha256 is None else f"SHA-256 {sha256[:12]}"


def _signed_bytes(payload: bytes) -> bytes:
    """Return the bytes under the signature, DSSE's pre-authentication encoding of these."""
    return f"DSSEv1 {len(PAYLOAD)} {PAYLOAD} {len(payload)} ".encode() + payload


def _decoded(text: str, where: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise LockstepError(f"{where}: found other characters, expected base64") from None


# ---- Keys ----


def _key(path: Path, side: Literal["private", "public"]) -> Any:
    """Read a signature's key, of one of `CURVES`."""
    if not path.is_file() or path.stat().st_size > MOST_KEY_BYTES:
        raise RequestError(f"{path}: found no small file, expected a key {KEY_FORM}")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    content, key = path.read_bytes(), None
    with suppress(TypeError, UnsupportedAlgorithm, ValueError):  # one with a password; no key
        if side == "private":
            key = serialization.load_pem_private_key(content, None)
        else:
            key = serialization.load_pem_public_key(content)
    curve = getattr(key, "curve", None)  # of the keys, only those of a curve like these have it
    if curve is None or curve.name not in CURVES:
        raise RequestError(f"{path}: not a {side} key {KEY_FORM}, expected one")
    return key


def _hash_of(curve: "ec.EllipticCurve") -> Any:
    from cryptography.hazmat.primitives import hashes

    return getattr(hashes, CURVES[curve.name])()
