"""Files and listings on a web server, held to one version and to limits of time and size.

Failures that another attempt may fix are `TransientError`; every other is an error.
"""

import json
import re
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import urllib3

from lockstep.errors import LockstepError, brief, reveals
from lockstep.files import once
from pipeline.net import checksum, limits, retry
from pipeline.net.connection import Request, opened
from pipeline.net.retry import TransientError, UnnamedVersionError
from pipeline.runfile import Network

PIECE_BYTES = 2**20
NUMBER = "[0-9]{1,18}"
PAGE_TYPES = ("html", "/json", "+json", "/xml", "+xml")  # ends of types that tokens never have
NEXT_PAGE = re.compile(r'<[^<>?]*\?([^<>]*)>; *rel="?next"?')


class Version(NamedTuple):
    """One version of a file.

    Attributes:
      size: length in bytes.
      tag: ETag or date of the last change; None without one.
      checksum: checksum of its bytes, see `Origin`.
      is_addressed: whether the address names the version, so that no answer is of another.
    """

    size: int
    tag: str | None
    checksum: str | None = None
    is_addressed: bool = False


def read(
    request: Request, start: int, stop: int, version: Version, network: Network, *, is_rest: bool
) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `stop`, in pieces as they come.

    `is_rest` says whether they complete what was read before, so that the answer must name the
    version.

    Raises:
      TransientError: the connection was cut or stalled, or the server is busy.
      UnnamedVersionError: it must name the version, and does not.
      LockstepError: the server refuses, or has another version of the file.
    """
    is_rest = is_rest and not version.is_addressed
    if is_rest and version.tag is None:
        raise _unnamed(request.name, version)
    headers = {} if (start, stop) == (0, version.size) else {"Range": f"bytes={start}-{stop - 1}"}
    with opened("GET", request, network, headers) as answer:
        named = _check_version(request.name, answer.headers, version)
        if is_rest and not named:
            raise _unnamed(request.name, version)
        skip = _check_range(request.name, answer, start, stop, version.size)
        left = skip + stop - start
        for piece in _paced(answer, left, request.name, network):
            left -= len(piece)
            skipped = min(skip, len(piece))
            skip, piece = skip - skipped, piece[skipped:]
            if piece:
                yield piece
        if left:
            raise TransientError(
                f"{request.name}: the connection was cut {left} bytes before the end"
            )
        if answer.status == 200 and _length(answer.headers) is None and answer.read1(1):
            raise LockstepError(
                f"{request.name}: sends more than {version.size} bytes, expected no more"
            )


def head(request: Request, network: Network) -> Version:
    """Return the server's description of a file.

    Raises:
      LockstepError: the server refuses, gives no length, or cannot be reached.
    """
    return retry.call(lambda: _head(request, network), network)


class Pages:
    """The pages of one listing, which all together have `most_bytes` at most (limits.py)."""

    def __init__(self, network: Network, most_bytes: int = limits.LISTING_BYTES):
        self._network, self._most_bytes = network, most_bytes
        self._limit: limits.ListingLimit | None = None

    def get(self, request: Request) -> tuple[Any, Request | None]:
        """Return a JSON document, and the request for the page after it, if any.

        That request goes to the same server, whatever the page says: another would see its
        credentials.

        Raises:
          LockstepError: the server refuses or cannot be reached, the document is invalid, or the
            listing has no end.
        """
        content, links = self._content(request)
        try:
            document = json.loads(content, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise LockstepError(f"{request.name}: expected JSON: {error}") from None
        link = NEXT_PAGE.search(links)
        if link is None:
            return document, None
        return document, request._replace(url=f"{request.url.partition('?')[0]}?{link[1]}")

    def content(self, request: Request) -> bytes:
        """Return a page as it is; what it raises, `get` raises too."""
        return self._content(request)[0]

    def _content(self, request: Request) -> tuple[bytes, str]:
        """Return the content of a page, within the limits, and what it says of other pages."""
        self._limit = self._limit or limits.ListingLimit(request.name, self._most_bytes)
        self._limit.next_page(request.url)
        content, links = retry.call(lambda: self._fetch(request, self._limit), self._network)
        self._limit.received(len(content))
        return bytes(content), links

    def _fetch(self, request: Request, limit: limits.ListingLimit) -> tuple[bytearray, str]:
        """Return the content of a page, and what it says of other pages."""
        with opened("GET", request, self._network, {}) as answer:
            content = read_whole(answer, request.name, limit, self._network)
            return content, answer.headers.get("Link", "")


def read_whole(
    answer: urllib3.BaseHTTPResponse, name: str, limit: limits.ListingLimit, network: Network
) -> bytearray:
    """Return a body that is read into memory, up to one byte more than the limit has room for.

    Raises:
      TransientError: the connection was cut or stalled.
      LockstepError: it takes too long.
    """
    content, room = bytearray(), limit.room
    for piece in _paced(answer, room + 1, name, network):
        content += piece
        limit.received(0)  # checks the time
    length = _length(answer.headers)
    if length is not None and len(content) < min(length, room + 1):
        raise TransientError(f"{name}: received {len(content)} bytes, expected {length}")
    return content


def _paced(
    answer: urllib3.BaseHTTPResponse, most: int, name: str, network: Network
) -> Iterator[bytes]:
    """Yield a body, or its first `most` bytes, in pieces; a server that hardly sends stalls."""
    since, received = time.monotonic(), 0
    while most and (piece := answer.read1(min(PIECE_BYTES, most))):
        most -= len(piece)
        received += len(piece)
        if (now := time.monotonic()) - since > network.stall_seconds:
            if received < limits.LEAST_BYTES:
                raise TransientError(f"{name}: {received} bytes in {now - since:.0f} s")
            since, received = now, 0
        yield piece


def _head(request: Request, network: Network) -> Version:
    # asks for a byte if need be: some servers give no length to HEAD, or do not know it
    with opened("HEAD", request, network, {}, accepted={403, 405, 501}) as answer:
        if answer.status < 300 and (size := _length(answer.headers)) is not None:
            return _describe(request.name, answer.headers, size)
    with opened("GET", request, network, {"Range": "bytes=0-0"}) as answer:
        headers = answer.headers
        total = re.fullmatch(f"bytes 0-0/({NUMBER})", headers.get("Content-Range", ""))
        size = int(total[1]) if answer.status == 206 and total else _length(headers)
        if size is None or (answer.status == 206 and not total):
            raise LockstepError(f"{request.name}: no Content-Length, expected the file's size")
        return _describe(request.name, headers, size)


def _describe(name: str, headers: Mapping[str, str], size: int) -> Version:
    _check_content(name, headers)
    tag = _tag(headers)
    if tag is not None and reveals(tag):  # it would be written down
        raise LockstepError(f"{name}: names version {brief(repr(tag))}, expected an ETag or a date")
    return Version(size, tag, _checksum(name, headers))


def _tag(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _length(headers: Mapping[str, str]) -> int | None:
    """Return Content-Length if it is a number."""
    number = re.fullmatch(NUMBER, headers.get("Content-Length", ""))
    return int(number[0]) if number else None


def _checksum(name: str, headers: Mapping[str, str]) -> str | None:
    """Return the checksum that Google's storage sends with a file."""
    said = headers.get("x-goog-hash", "")
    hashes = dict(pair.strip().partition("=")[::2] for pair in said.split(","))
    for kind, size in checksum.SIZES.items():
        with suppress(ValueError):  # invalid base64
            if digest := b64decode(hashes.get(kind, "")):
                if len(digest) != size:
                    found = brief(repr(said))
                    raise LockstepError(f"{name}: x-goog-hash {found}, expected {size} bytes")
                return f"{kind}:{digest.hex()}"
    return None


# ---- Which version, and which bytes of it ----


def _check_version(name: str, headers: Mapping[str, str], version: Version) -> bool:
    """Check that the answer is of no other version; return whether it says that it is of this."""
    _check_content(name, headers)
    if version.tag is None:
        return False
    is_date = re.match(r"\w{3}, \d", version.tag)  # where the server gave no ETag
    tag = headers.get("Last-Modified" if is_date else "ETag")
    if tag is not None and _bare(tag) != _bare(version.tag):
        raise LockstepError(
            f"{name}: changed while it was read: version {brief(repr(tag))}, expected "
            f"{brief(repr(version.tag))}; run again to read it anew"
        )
    return tag is not None


def _unnamed(name: str, version: Version) -> UnnamedVersionError:
    expected = (
        "an ETag or a date" if version.tag is None else f"{brief(repr(version.tag))} as before"
    )
    return UnnamedVersionError(
        f"{name}: the server does not say of which version a part of the file is, expected "
        f"{expected}"
    )


def _check_range(
    name: str, answer: urllib3.BaseHTTPResponse, start: int, stop: int, size: int
) -> int:
    """Check that the answer holds the range; return how many bytes precede it."""
    headers = answer.headers
    if answer.status == 200:  # the whole file, even if a range was requested
        length = _length(headers)
        if length is not None and length != size:
            raise LockstepError(f"{name}: sends {length} bytes, expected {size} as before")
        return start
    text = headers.get("Content-Range", "")
    sent = re.fullmatch(rf"bytes ({NUMBER})-({NUMBER})/({NUMBER}|\*)", text)
    if sent is None or (int(sent[1]), int(sent[2])) != (start, stop - 1):
        raise LockstepError(
            f"{name}: sends range {brief(repr(text))}, expected bytes {start}-{stop - 1}"
        )
    if sent[3] not in ("*", str(size)):
        raise LockstepError(f"{name}: has {sent[3]} bytes, expected {size} as before")
    return 0


def _check_content(name: str, headers: Mapping[str, str]) -> None:
    """Check that the body is the file itself: not an error or sign-in page, not compressed."""
    said = headers.get("Content-Type", "").partition(";")[0].strip()
    kind = said.lower()  # not shown: in lower case a secret would not be hidden
    is_itself = name.endswith(".json") and kind.endswith("json")
    if kind.endswith(PAGE_TYPES) and not is_itself:
        raise LockstepError(
            f"{name}: sends a web page ({brief(said)}), expected the file itself; does the server "
            "want a sign-in?"
        )
    encoding = headers.get("Content-Encoding", "identity").strip()
    if encoding.lower() != "identity":
        raise LockstepError(f"{name}: sent as {brief(encoding)}, expected plain bytes")


def _bare(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')
