"""Requests and answers: 8 bytes of length in big-endian order, then JSON."""

import json
import math
import socket
import struct
import traceback
from typing import Any

LONGEST = 1 << 26  # bytes: a job lists paths, never values


def receive(sock: socket.socket) -> Any:
    """The next request; None where the host has closed the connection."""
    header = _exactly(sock, 8)
    if header is None:
        return None
    (length,) = struct.unpack(">Q", header)
    if length > LONGEST:
        raise ValueError(f"frame of {length} bytes; at most {LONGEST} expected")
    body = _exactly(sock, length)
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
        body = json.dumps(answer, allow_nan=False).encode()
        if len(body) > LONGEST:
            raise ValueError(f"answer of {len(body)} bytes; at most {LONGEST} expected")
    except (TypeError, ValueError) as error:
        body = json.dumps({"id": answer["id"], "ok": False, "error": described(error)}).encode()
    sock.sendall(struct.pack(">Q", len(body)) + body)


def described(error: BaseException) -> str:
    """Return `type: text` in one line, which the host shows, and the traceback below it."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{line}\n{''.join(traceback.format_exception(error))}"


def finite(value: float) -> float | None:
    """A number for JSON, which knows no NaN and no infinity: None for those."""
    return float(value) if math.isfinite(value) else None


def metrics_of(values: dict) -> dict:
    """Return metrics for JSON: bool, int, float or text; floats that are not finite as text.

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
