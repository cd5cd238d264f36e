"""A web server asked for ranges of a file, with time limits, and held to one version of it.

Nothing is tried again here: what another attempt may mend is `Broken`, anything else an error.
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
from urllib3.exceptions import (
    HTTPError,
    MaxRetryError,
    NewConnectionError,
    ResponseError,
    SSLError,
    TimeoutError,
)

from pipeline import __version__
from pipeline.errors import LockstepError
from pipeline.net.redact import said
from pipeline.runfile.network import Broken, Network, Patience

BUSY = {408, 425, 429, 500, 502, 503, 504}  # answers after which a server may be asked again
REDIRECTS = 10
CONNECT_SECONDS = 10.0
PIECE_BYTES = 2**20
LEAST_BYTES = 2**10  # in `stall_seconds`: a server that sends less has stalled
LISTING_BYTES = 2**26  # at most: a listing is read into memory
NUMBER = "[0-9]{1,18}"
OFFLINE = "HF_HUB_OFFLINE"
PROXIES = tuple(
    spelt
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for spelt in (name, name.upper())
)


class Request(NamedTuple):
    """What is asked.

    Attributes:
      url: the server's address, without a user and password.
      headers: with credentials, which no other server is shown.
      name: what errors call it, without credentials.
    """

    url: str
    headers: dict[str, str]
    name: str


class Version(NamedTuple):
    """Which version of a file: its size in bytes, and the ETag where there is one."""

    size: int
    tag: str | None


class Head(NamedTuple):
    """What a server says of a file: its size, its ETag or date, its checksum as in `Origin`."""

    size: int
    tag: str | None
    checksum: str | None


def offline() -> bool:
    """Whether $HF_HUB_OFFLINE says that no server is to be asked."""
    return os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}


def read(
    request: Request, start: int, stop: int, version: Version, network: Network
) -> Iterator[bytes]:
    """The bytes of a file from `start` to `stop`, in pieces as they come.

    Raises:
      Broken: the connection was cut or stalled, or the server is too busy.
      LockstepError: the server refuses, or has another version of the file.
    """
    if start >= stop:
        return
    headers = {} if (start, stop) == (0, version.size) else {"Range": f"bytes={start}-{stop - 1}"}
    with _answer("GET", request, network, headers) as answer:
        skip = _check_version(request, answer, start, stop, version)
        left, since, came = skip + stop - start, time.monotonic(), 0
        while left and (piece := answer.read1(min(PIECE_BYTES, left))):
            left -= len(piece)
            came += len(piece)
            if (now := time.monotonic()) - since > network.stall_seconds:
                if came < LEAST_BYTES:
                    raise Broken(f"{request.name}: {came} bytes in {now - since:.0f} s")
                since, came = now, 0
            if skip:
                unwanted = min(skip, len(piece))
                skip, piece = skip - unwanted, piece[unwanted:]
            if piece:
                yield piece
        if left:
            raise Broken(f"{request.name}: the connection was cut {left} bytes before the end")
        if answer.status == 200 and _length(answer.headers) is None and answer.read1(1):
            raise LockstepError(
                f"{request.name}: sends more than {version.size} bytes, expected so many as it "
                "said before"
            )


def head(request: Request, network: Network) -> Head:
    """What the server says of a file, tried again as often as `network` says.

    Raises:
      LockstepError: the server refuses, gives no length, or cannot be reached.
    """
    return _patiently(lambda: _head(request, network), network)


def get_json(request: Request, network: Network) -> Any:
    """A JSON document, tried again as often as `network` says.

    Raises:
      LockstepError: the server refuses or cannot be reached, or it is no JSON.
    """
    return get_page(request, network)[0]


def get_page(request: Request, network: Network) -> tuple[Any, Request | None]:
    """A JSON document, and the request for the one that the server says follows it, if any.

    The same server is asked for that, whatever it says: another would see its credentials.

    Raises:
      LockstepError: as `get_json`.
    """

    def get() -> tuple[bytearray, str]:
        with _answer("GET", request, network, {}) as answer:
            content = bytearray()
            while piece := answer.read1(PIECE_BYTES):
                content += piece
                if len(content) > LISTING_BYTES:
                    raise LockstepError(f"{request.name}: over {LISTING_BYTES} bytes of a listing")
            length = _length(answer.headers)
            if length is not None and len(content) < length:
                raise Broken(f"{request.name}: {len(content)} bytes came, expected {length}")
            return content, answer.headers.get("Link", "")

    content, links = _patiently(get, network)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{request.name}: expected JSON: {error}") from None
    found = re.search(r'<[^<>?]*\?([^<>]*)>; *rel="?next"?', links)
    if found is None:
        return document, None
    more = request._replace(url=f"{request.url.partition('?')[0]}?{found[1]}")
    if more == request:
        raise LockstepError(f"{request.name}: a listing that goes on with itself, expected an end")
    return document, more


def _patiently(ask: Any, network: Network) -> Any:
    patience = Patience(network.attempts)
    while True:
        try:
            return ask()
        except Broken as error:
            try:
                patience.failed(error)
            except Broken as last:
                raise LockstepError(f"{last}, expected an answer; run again to go on") from None


def _head(request: Request, network: Network) -> Head:
    # bytes of it, since some servers give no length to HEAD, or do not know it
    with _answer("HEAD", request, network, {}, refused={403, 405, 501}) as answer:
        headers = answer.headers
        if answer.status < 300 and (size := _length(headers)) is not None:
            _check_kind(request.name, headers)
            return Head(size, _tag(headers), _checksum(headers))
    with _answer("GET", request, network, {"Range": "bytes=0-0"}) as answer:
        headers = answer.headers
        total = re.fullmatch(f"bytes 0-0/({NUMBER})", headers.get("Content-Range", ""))
        size = int(total[1]) if answer.status == 206 and total else _length(headers)
        if size is None or (answer.status == 206 and not total):
            raise LockstepError(f"{request.name}: no Content-Length, expected the file's size")
        _check_kind(request.name, headers)
        return Head(size, _tag(headers), _checksum(headers))


def _tag(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _length(headers: Mapping[str, str]) -> int | None:
    """Content-Length, where it is one."""
    found = re.fullmatch(NUMBER, headers.get("Content-Length", ""))
    return int(found[0]) if found else None


def _checksum(headers: Mapping[str, str]) -> str | None:
    """What Google's storage says beside a file."""
    said = dict(
        pair.strip().partition("=")[::2] for pair in headers.get("x-goog-hash", "").split(",")
    )
    for kind in ("md5", "crc32c"):
        with suppress(ValueError):  # that is no base64
            if digest := b64decode(said.get(kind, "")):
                return f"{kind}:{digest.hex()}"
    return None


# ---- One request ----


@lru_cache(maxsize=4)
def _pool(connections: int, proxy: str | None) -> urllib3.PoolManager:
    how = {"maxsize": connections, "headers": {"User-Agent": f"lockstep/{__version__}"}}
    return urllib3.ProxyManager(proxy, **how) if proxy else urllib3.PoolManager(**how)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    said = tuple(os.environ.get(name) for name in PROXIES)
    return _find_proxy(parts.scheme, parts.netloc, said)


@lru_cache(maxsize=64)  # looking through the environment takes longer than the request's own work
def _find_proxy(scheme: str, place: str, said: tuple[str | None, ...]) -> str | None:
    return None if proxy_bypass(place) else getproxies().get(scheme)


@contextmanager
def _answer(
    method: str,
    request: Request,
    network: Network,
    headers: dict[str, str],
    refused: set[int] = frozenset(),
) -> Iterator[urllib3.BaseHTTPResponse]:
    """An answer whose body is still to come, and what goes wrong while it does.

    Args:
      method: GET or HEAD.
      request: what is asked.
      network: the time limits.
      headers: beside the request's own.
      refused: answers that the caller looks at itself.
    """
    if offline():
        raise LockstepError(f"{request.name}: {OFFLINE} is set, expected what was fetched before")
    name = request.name
    limits = urllib3.Timeout(connect=CONNECT_SECONDS, read=network.stall_seconds)
    # redirects are followed, and credentials stay with the server that they are for
    retries = urllib3.Retry(
        connect=0, read=0, status=0, other=0, redirect=REDIRECTS, respect_retry_after_header=False
    )
    secret = request.headers.get("Authorization", request.headers.get("authorization", ""))
    secret = secret.partition(" ")[2]
    answer = None
    try:
        try:
            answer = _pool(network.connections, _proxy(request.url)).request(
                method,
                request.url,
                headers={"Accept-Encoding": "identity"} | request.headers | headers,
                timeout=limits,
                retries=retries,
                preload_content=False,
                decode_content=False,
            )
        except ValueError as error:  # of this address, or of one that it redirects to
            raise LockstepError(f"{name}: {said(error, secret)}, expected an address") from None
        if answer.status not in refused:
            _check_status(name, answer, secret)
        yield answer
        if answer.length_remaining == 0:
            answer.drain_conn()  # there is nothing, but until it is read the connection is in use
            answer.release_conn()
    except MaxRetryError as error:
        reason = error.reason
        if isinstance(reason, ResponseError):
            raise LockstepError(f"{name}: {said(reason, secret)}, expected a file") from None
        if isinstance(reason, SSLError):
            raise LockstepError(
                f"{name}: {said(reason, secret)}, expected a valid certificate"
            ) from None
        raise Broken(f"{name}: {_words(reason, secret)}") from None
    except (HTTPError, OSError) as error:
        raise Broken(f"{name}: {_words(error, secret)}") from None
    finally:
        if answer is not None and answer.length_remaining != 0:
            answer.close()  # what is on its way would be the next answer's


def _words(error: Exception | None, secret: str) -> str:
    """What went wrong with a connection, without the library's own objects."""
    if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
        return "no byte came in time"
    inner = next((arg for arg in error.args if isinstance(arg, Exception)), error)
    if isinstance(inner, BadStatusLine) and not isinstance(inner, RemoteDisconnected):
        return "what answers there speaks no HTTP"
    if isinstance(inner, IncompleteRead):
        return "the connection was cut"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return re.sub(r"<[^<>]*>:? ?|\w+\(host=[^)]*\): ", "", said(inner, secret))


def _check_status(name: str, answer: urllib3.BaseHTTPResponse, secret: str) -> None:
    status = answer.status
    if status in BUSY:
        wait = answer.headers.get("Retry-After")
        seconds = None
        if wait is not None:
            try:
                seconds = urllib3.Retry().parse_retry_after(wait)
            except (HTTPError, ValueError, OverflowError):  # neither seconds nor a date
                seconds = None
        raise Broken(f"{name}: answered {status} {answer.reason or ''}".rstrip(), seconds)
    if status not in (200, 206):
        words = "found it changed" if status == 416 else f"answered {status} {answer.reason or ''}"
        why = answer.headers.get("X-Error-Message")  # the hub's
        because = f" ({said(Exception(why), secret)})" if why else ""
        hint = ", or credentials for it" if status in (401, 403) else ""
        raise LockstepError(
            f"{name}: {words.rstrip()}{because}, expected a file that may be read{hint}"
        )


def _check_version(
    request: Request, answer: urllib3.BaseHTTPResponse, start: int, stop: int, version: Version
) -> int:
    """Sees that the answer is of this version; how many bytes come before the first wanted."""
    name, headers = request.name, answer.headers
    _check_kind(name, headers)
    found = _tag(headers)
    if version.tag is not None and found is not None and _bare(found) != _bare(version.tag):
        raise LockstepError(
            f"{name}: changed while it was read: it is version {found!r:.60}, expected "
            f"{version.tag!r:.60}; run again to read it anew"
        )
    if answer.status == 200:  # the whole, also where a range was asked for
        length = _length(headers)
        if length is not None and length != version.size:
            raise LockstepError(
                f"{name}: sends {length} bytes, expected {version.size} as it said before"
            )
        return start
    said = headers.get("Content-Range", "")
    place = re.fullmatch(rf"bytes ({NUMBER})-({NUMBER})/({NUMBER}|\*)", said)
    if place is None or (int(place[1]), int(place[2])) != (start, stop - 1):
        raise LockstepError(
            f"{name}: sends the range {said!r:.60}, expected bytes {start}-{stop - 1}"
        )
    if place[3] not in ("*", str(version.size)):
        raise LockstepError(
            f"{name}: has {place[3]} bytes, expected {version.size} as it said before"
        )
    return 0


def _check_kind(name: str, headers: Mapping[str, str]) -> None:
    """Sees that what comes is not a page about the file, or one to sign in to a network, and is not
    compressed on its way."""
    if headers.get("Content-Type", "").startswith("text/html"):
        raise LockstepError(f"{name}: sends a web page, expected the file itself")
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise LockstepError(f"{name}: sent as {encoding}, expected plain bytes")


def _bare(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')
