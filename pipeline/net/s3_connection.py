"""Requests of s3fs, whose answers are limited in bytes: it reads each into memory, however long."""

import re
from collections.abc import Mapping
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

from lockstep.errors import LockstepError, keep_secret
from pipeline.net import limits

PIECE_BYTES = 2**16


class LimitedSession(AIOHTTPSession):
    """The connections of aiobotocore, as its setting `http_session_cls` takes them.

    A listing and an error are read here, up to LISTING_BYTES. A range of a file is handed on, if it
    says that it is no longer than what was asked for; aiohttp reads no more of it than it says.
    """

    async def send(self, request: Any) -> Any:
        """Send a request, and return the answer."""
        _keep_secrets(request.headers)
        is_file, request.stream_output = request.stream_output, True  # so that nothing is read yet
        answer = await super().send(request)
        if is_file and answer.status_code < 300:
            _check_length(request.headers["Range"], answer.headers)
        else:
            answer._content = await _content(answer.raw)
        return answer


async def _content(raw: Any) -> bytes:
    """Return the body of an answer."""
    content = bytearray()
    while piece := await raw.content.read(PIECE_BYTES):
        content += piece
        if len(content) > limits.LISTING_BYTES:
            raw.close()
            raise LockstepError(f"a listing of over {limits.LISTING_BYTES} bytes, expected less")
    return bytes(content)


def _check_length(asked: str | bytes, headers: Mapping[str, str]) -> None:
    """Check that an answer is no longer than the requested range."""
    asked = asked.decode() if isinstance(asked, bytes) else asked
    first, last = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", asked).groups()
    expected = int(last) - int(first) + 1
    length = re.fullmatch("[0-9]{1,18}", headers.get("content-length", ""))
    if length is None or "transfer-encoding" in headers:
        raise LockstepError(f"sends no length, expected {expected} bytes of a range")
    if int(length[0]) > expected:
        raise LockstepError(f"sends {length[0]} bytes, expected {expected} of a range")


def _keep_secrets(headers: Any) -> None:
    """Hide a request's credentials in later errors, since a store may repeat them."""
    for name, value in headers.items():
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        if name.lower() == "x-amz-security-token":
            keep_secret(text)
        elif name.lower() == "authorization" and (key := re.search("Credential=([^/,]+)", text)):
            keep_secret(key[1])
