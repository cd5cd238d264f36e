"""What is signed: a body in canonical JSON, with an Ed25519 signature over it and over its kind.

    {"body":{...},"signature":"128 hexadecimal digits"}

and newlines after it, where the slot has one length. Canonical is JSON in ASCII with sorted keys,
without spaces and without NaN. It is serialised anew and compared, so that a body has one encoding.
The signature is over `lockstep/KIND/1`, a zero byte, and the body, so that a body of one kind does
not pass for one of another.
"""

import json
from typing import Any, ClassVar, TypeVar

from cryptography.exceptions import InvalidSignature

from lockstep.errors import LockstepError
from lockstep.files import loads
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from parts.volunteers.keys import PrivateKey, PublicKey, public_text

MOST_BYTES = 2**20
FILLING = b"\n"


class Body(Table):
    """The body of a signed object. A subclass is one kind; its lists are tuples with `AsTuple`."""

    kind: ClassVar[str]


AnyBody = TypeVar("AnyBody", bound=Body)


def canonical(value: Any) -> bytes:
    """Return the one encoding of a JSON value that is signed."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def sign(body: Body, key: PrivateKey, length: int | None = None) -> bytes:
    """Return a signed body, filled up to `length` bytes."""
    content = canonical(body.model_dump(mode="json"))
    signature = key.sign(_signed_bytes(body.kind, content)).hex()
    data = canonical({"body": json.loads(content), "signature": signature})
    most = MOST_BYTES if length is None else length
    if len(data) > most:
        raise LockstepError(f"{body.kind}: {len(data)} bytes, expected at most {most}")
    return data if length is None else data.ljust(length, FILLING)


def opened(
    model: type[AnyBody], data: bytes | None, key: PublicKey, where: str, length: int | None = None
) -> AnyBody:
    """Return the body of a signed object, which `where` names in errors.

    Args:
      model: Its kind and form.
      data: Its bytes, a stranger's; None where they are more than was read.
      key: Who must have signed it.
      where: Its name.
      length: Of all of it, where the slot has one.

    Raises:
      LockstepError: it is of other length, has another encoding or form, or is signed by another.
    """
    most = MOST_BYTES if length is None else length
    if data is None or len(data) > most:
        raise LockstepError(f"{where}: over {most} bytes, expected at most that")
    if length is not None and len(data) != length:
        raise LockstepError(f"{where}: {len(data)} bytes, expected {length}")
    content = data if length is None else data.rstrip(FILLING)
    body, signature = _parts(content, where)
    parsed = validate_json(model, body, where)
    try:
        key.verify(signature, _signed_bytes(model.kind, body))
    except InvalidSignature:
        raise LockstepError(
            f"{where}: the signature does not match the content and the key {public_text(key)}, "
            "expected one that does"
        ) from None
    return parsed


def unsigned(model: type[AnyBody], data: bytes | None, where: str) -> AnyBody:
    """Return the body of an object whose signature is not looked at, see `opened`."""
    if data is None or len(data) > MOST_BYTES:
        raise LockstepError(f"{where}: over {MOST_BYTES} bytes, expected at most that")
    return validate_json(model, _parts(data.rstrip(FILLING), where)[0], where)


def is_signed(
    kind: str, data: bytes | None, key: PublicKey, where: str, length: int | None = None
) -> bool:
    """Return whether somebody signed an object of this kind, whatever its form is.

    Arguments are those of `opened`.
    """
    model = type("AnyBody", (Body,), {"kind": kind, "model_config": {"extra": "allow"}})
    try:
        opened(model, data, key, where, length)
    except LockstepError:
        return False
    return True


def _parts(content: bytes, where: str) -> tuple[bytes, bytes]:
    """Return the body and the signature of a signed object's canonical JSON."""
    try:
        document = loads(content)
        body, signature = document["body"], bytes.fromhex(document["signature"])
        if canonical({"body": body, "signature": signature.hex()}) != content:
            raise ValueError("another encoding")
        return canonical(body), signature
    except (ValueError, TypeError, LookupError, RecursionError):
        raise LockstepError(
            f"{where}: found other bytes, expected a body and its signature in canonical JSON"
        ) from None


def _signed_bytes(kind: str, body: bytes) -> bytes:
    return b"lockstep/%s/1\0%s" % (kind.encode(), body)
