"""A message in a payload of the run's one length: zeros follow it."""

from lockstep.errors import LockstepError
from lockstep.wire.message import Form
from lockstep.wire.spool import Buffer


def payload_bytes(form: Form, most: int) -> int:
    """Return the one length of a run's payloads.

    Raises:
      LockstepError: it is over `most`.
    """
    if form.bytes_most > most:
        raise LockstepError(
            f"[volunteers] most_bytes is {most}, expected at least {form.bytes_most} for a message "
            "of this run, or a method that sends less"
        )
    return form.bytes_most


def padded(message: Buffer, length: int) -> bytes:
    """Return a message as a payload of so many bytes, which it has at most."""
    return bytes(message).ljust(length, b"\0")


def unpadded(payload: bytes, size: int, where: str) -> memoryview:
    """Return the message in a payload; `size` is how long its sender says it is.

    Raises:
      LockstepError: it is longer than the payload, or something else follows it.
    """
    if size > len(payload):
        raise LockstepError(f"{where}: {len(payload)} bytes, expected {size} of a message")
    if payload.count(0, size) != len(payload) - size:
        raise LockstepError(f"{where}: has more than {size} bytes, expected zeros after them")
    return memoryview(payload)[:size]
