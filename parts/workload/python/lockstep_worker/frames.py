"""Requests and answers: 8 bytes of length in big-endian order, then JSON. For both ends."""

import json
import math
import os
import socket
import struct
import traceback
from typing import Any

LONGEST = 1 << 26  # bytes: arrays go by path
HEADER = struct.Struct(">Q")
STANDARD = os.path.dirname(os.__file__)  # where Python's own modules are


def packed(value: dict) -> bytes:
    """Return an answer as it is sent: its length, then JSON.

    Raises:
        ValueError, TypeError: it is too long, or has a value that JSON does not have.
    """
    body = json.dumps(value, allow_nan=False).encode()
    if len(body) > LONGEST:
        raise ValueError(f"a message of {len(body)} bytes, expected at most {LONGEST}")
    return HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Return the length of the request or answer that follows.

    Raises:
        ValueError: it is 0 or above `LONGEST`.
    """
    (length,) = HEADER.unpack(header)
    if not 0 < length <= LONGEST:
        raise ValueError(f"a message of {length} bytes, expected 1 to {LONGEST}")
    return length


def receive(sock: socket.socket) -> Any:
    """Return the host's next request; None where it has closed the connection."""
    header = _exactly(sock, HEADER.size)
    body = None if header is None else _exactly(sock, length_of(header))
    return None if body is None else json.loads(body)


def _exactly(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def send(sock: socket.socket, answer: dict) -> None:
    """Send an answer, or an error in its place if it is too long or no JSON."""
    try:
        message = packed(answer)
    except (TypeError, ValueError) as error:
        message = packed({"id": answer["id"], "ok": False, "error": described(error)})
    sock.sendall(message)


def described(error: BaseException) -> str:
    """Return an error for the host, `type: text` in one line, and the traceback below it.

    The line ends with the place in the user's own code, if the error came by way of it.
    """
    line = " ".join(f"{type(error).__name__}: {error}".split())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            line += f" ({os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name})"
            break
    return f"{line}\n{''.join(traceback.format_exception(error))}"


def is_users(file: str) -> bool:
    """Return whether a file that an answer names is a user's: not installed, nor ours."""
    installed = f"{os.sep}site-packages{os.sep}" in file or file.startswith((STANDARD, "<"))
    room = os.path.basename(os.path.dirname(file))
    return not installed and room not in ("lockstep_worker", "lockstep_torch")


def finite(value: float) -> float | None:
    """A number for an answer's JSON, which knows no NaN and no infinity: None for those."""
    return float(value) if math.isfinite(value) else None


def metrics_of(values: dict) -> dict:
    """Return metrics for an answer's JSON: bool, int, float or text; others as text.

    Raises:
        TypeError: a value is something else; the metric is named.
    """
    metrics = {}
    for name, value in values.items():
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, bool | int | float | str):
            kind = type(plain).__name__
            raise TypeError(f"metric {name!r} is a {kind}; a number or a text expected")
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = str(plain)
        metrics[str(name)] = plain
    return metrics
