"""Requests to a web server, with time limits, held to one server and one version of a file.

Failures that another attempt may fix are `TransientError`; every other is an error.
"""

import json
import os
import re
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.client import BadStatusLine, IncompleteRead, RemoteDisconnected
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions

from pipeline import __version__
from pipeline.errors import LockstepError, brief, keep_secret, reveals
from pipeline.net import retry
from pipeline.net.redact import message
from pipeline.net.retry import TransientError, UnnamedVersionError
from pipeline.runfile import Network

BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses after which a server may be asked again
# Redirects are followed, and urllib3 shows credentials to no other server; retries are ours.
REDIRECTS = urllib3.Retry(
    connect=0, read=0, status=0, other=0, redirect=10, respect_retry_after_header=False
)
CONNECT_SECONDS = 10.0
PIECE_BYTES = 2**20
LEAST_BYTES = 2**10  # in `stall_seconds`: a server that sends less has stalled
LISTING_BYTES = 2**26  # at most: a listing is read into memory
NUMBER = "[0-9]{1,18}"
OFFLINE = "HF_HUB_OFFLINE"
PROXY_VARIABLES = [
    spelling
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
]
NEXT_PAGE = re.compile(r'<[^<>?]*\?([^<>]*)>; *rel="?next"?')


class Request(NamedTuple):
    """A request to a server.

    Attributes:
      url: address, without a user and password.
      headers: with credentials, which no other server is shown.
      name: the address in errors, without credentials.
    """

    url: str
    headers: dict[str, str]
    name: str


class Version(NamedTuple):
    """One version of a file.

    Attributes:
      size: in bytes.
      tag: ETag or date of the last change; None without one.
      checksum: as in `Origin`.
      is_addressed: whether the address names the version, so that no answer is of another.
    """

    size: int
    tag: str | None
    checksum: str | None = None
    is_addressed: bool = False


def offline() -> bool:
    """Return whether $HF_HUB_OFFLINE forbids requests."""
    return os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}


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
    with _answer("GET", request, network, headers) as answer:
        named = _check_version(request.name, answer.headers, version)
        if is_rest and not named:
            raise _unnamed(request.name, version)
        skip = _check_range(request.name, answer, start, stop, version.size)
        left, since, received = skip + stop - start, time.monotonic(), 0
        while left and (piece := answer.read1(min(PIECE_BYTES, left))):
            left -= len(piece)
            received += len(piece)
            if (now := time.monotonic()) - since > network.stall_seconds:
                if received < LEAST_BYTES:
                    raise TransientError(f"{request.name}: {received} bytes in {now - since:.0f} s")
                since, received = now, 0
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


def get_page(request: Request, network: Network) -> tuple[Any, Request | None]:
    """Return a JSON document, and the request for the page after it, if any.

    That request goes to the same server, whatever the page says: another would see its credentials.

    Raises:
      LockstepError: the server refuses or cannot be reached, or the document is invalid.
    """

    def get() -> tuple[bytearray, str]:
        with _answer("GET", request, network, {}) as answer:
            content = bytearray()
            while piece := answer.read1(PIECE_BYTES):
                content += piece
                if len(content) > LISTING_BYTES:
                    raise LockstepError(
                        f"{request.name}: a listing of over {LISTING_BYTES} bytes, expected less"
                    )
            length = _length(answer.headers)
            if length is not None and len(content) < length:
                raise TransientError(
                    f"{request.name}: received {len(content)} bytes, expected {length}"
                )
            return content, answer.headers.get("Link", "")

    content, links = retry.call(get, network)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{request.name}: expected JSON: {error}") from None
    link = NEXT_PAGE.search(links)
    if link is None:
        return document, None
    following = request._replace(url=f"{request.url.partition('?')[0]}?{link[1]}")
    if following == request:
        raise LockstepError(f"{request.name}: a page that links to itself, expected another page")
    return document, following


def _head(request: Request, network: Network) -> Version:
    # in bytes, since some servers give no length to HEAD, or do not know it
    with _answer("HEAD", request, network, {}, accepted={403, 405, 501}) as answer:
        if answer.status < 300 and (size := _length(answer.headers)) is not None:
            return _describe(request.name, answer.headers, size)
    with _answer("GET", request, network, {"Range": "bytes=0-0"}) as answer:
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
    return Version(size, tag, _checksum(headers))


def _tag(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _length(headers: Mapping[str, str]) -> int | None:
    """Return Content-Length if it is a number."""
    number = re.fullmatch(NUMBER, headers.get("Content-Length", ""))
    return int(number[0]) if number else None


def _checksum(headers: Mapping[str, str]) -> str | None:
    """Return the checksum that Google's storage sends with a file."""
    pairs = headers.get("x-goog-hash", "").split(",")
    hashes = dict(pair.strip().partition("=")[::2] for pair in pairs)
    for kind in ("md5", "crc32c"):
        with suppress(ValueError):  # invalid base64
            if digest := b64decode(hashes.get(kind, "")):
                return f"{kind}:{digest.hex()}"
    return None


# ---- One request ----


@lru_cache(maxsize=4)
def _pool(connections: int, proxy: str | None) -> urllib3.PoolManager:
    settings = {"maxsize": connections, "headers": {"User-Agent": f"lockstep/{__version__}"}}
    return urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    variables = tuple(map(os.environ.get, PROXY_VARIABLES))
    return _find_proxy(parts.scheme, parts.netloc, variables)


@lru_cache(maxsize=64)  # searching the environment takes 0.4 ms, a small file 1.1 ms
def _find_proxy(scheme: str, host: str, variables: tuple[str | None, ...]) -> str | None:
    return None if proxy_bypass(host) else getproxies().get(scheme)


@contextmanager
def _answer(
    method: str,
    request: Request,
    network: Network,
    headers: dict[str, str],
    accepted: set[int] = frozenset(),
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Open an answer whose body is still to come; failures inside are TransientError or an error.

    `headers` are sent beside the request's own; the caller handles the `accepted` statuses.
    """
    if offline():
        raise LockstepError(f"{request.name}: {OFFLINE} is set, expected it in the store already")
    name, answer = request.name, None
    said = request.headers.get("Authorization", request.headers.get("authorization", ""))
    keep_secret(said.partition(" ")[2])
    try:
        try:
            answer = _pool(network.connections, _proxy(request.url)).request(
                method,
                request.url,
                headers={"Accept-Encoding": "identity"} | request.headers | headers,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=network.stall_seconds),
                retries=REDIRECTS,
                preload_content=False,
                decode_content=False,
            )
        except ValueError as error:  # of this address, or of one that it redirects to
            raise LockstepError(f"{name}: {message(error)}, expected a valid address") from None
        if answer.status not in accepted:
            _check_status(name, answer)
        yield answer
        if answer.length_remaining == 0:
            answer.drain_conn()  # nothing is left, but until it is read the connection is in use
            answer.release_conn()
    except exceptions.MaxRetryError as error:
        reason = error.reason
        if isinstance(reason, exceptions.ResponseError | exceptions.SSLError):
            is_tls = isinstance(reason, exceptions.SSLError)
            expected = "a valid certificate" if is_tls else "a file"
            raise LockstepError(f"{name}: {message(reason)}, expected {expected}") from None
        raise TransientError(f"{name}: {_explain(reason)}") from None
    except (exceptions.HTTPError, OSError) as error:
        raise TransientError(f"{name}: {_explain(error)}") from None
    finally:
        if answer is not None and answer.length_remaining != 0:
            answer.close()  # or what is on its way would become the next answer


def _explain(error: Exception | None) -> str:
    """Return why a connection failed, without the library's own objects."""
    timed_out = isinstance(error, exceptions.TimeoutError)
    if timed_out and not isinstance(error, exceptions.NewConnectionError):
        return "timed out"
    inner = next((arg for arg in error.args if isinstance(arg, Exception)), error)
    if isinstance(inner, BadStatusLine) and not isinstance(inner, RemoteDisconnected):
        return "the server does not speak HTTP"
    if isinstance(inner, IncompleteRead):
        return "the connection was cut"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return re.sub(r"<[^<>]*>:? ?|\w+\(host=[^)]*\): ", "", message(inner))


def _check_status(name: str, answer: urllib3.BaseHTTPResponse) -> None:
    status = f"answered {answer.status} {brief(answer.reason or '')}".rstrip()
    if answer.status in BUSY:
        raise TransientError(f"{name}: {status}", answer.headers.get("Retry-After"))
    if answer.status == 416:
        status = "changed while it was read"
    if answer.status not in (200, 206):
        reason = answer.headers.get("X-Error-Message")  # the hub's
        reason = f" ({message(Exception(reason))})" if reason else ""
        hint = ", or credentials for it" if answer.status in (401, 403) else ""
        raise LockstepError(f"{name}: {status}{reason}, expected a readable file{hint}")


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
    if answer.status == 200:  # the whole file, also where a range was asked for
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
    if headers.get("Content-Type", "").startswith("text/html"):
        raise LockstepError(f"{name}: sends a web page, expected the file itself")
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise LockstepError(f"{name}: sent as {brief(encoding)}, expected plain bytes")


def _bare(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')
