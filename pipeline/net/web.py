"""Files and listings on a web server, held to one version and to limits of time and size.

There is a limit on everything that a server could do without end. Headers, interim answers before
them included, have as long as a stall and HTTP_HEADER_BYTES. Redirects are followed here, since
urllib3 would read the body of each to its end, and credentials are shown to no other server. None
leads from https:// to http://, so no server answers whose name has no certificate.
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
from http import client
from io import BufferedReader, BytesIO
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions

from . import limits
from .errors import AGENT, NetError, brief, keep_secret, message, reveals
from .limits import NetSettings, NotFetchedError, TransientError
from .origin import SIZES, Origin, parse

BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses after which a request may be repeated
CREDENTIALS = {"authorization", "cookie", "proxy-authorization"}  # headers for one server
BODY_BYTES = 2**16  # at most, read of the body of a redirect or an error
OFFLINE = "HF_HUB_OFFLINE"
PROXY_VARIABLES = [
    spelling
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
]
PIECE_BYTES = 2**20
HEADER_NUMBER = "[0-9]{1,18}"
PAGE_TYPES = ("html", "/json", "+json", "/xml", "+xml")  # ends of types that tokens never have
JSON_ENDINGS = tuple(f".json{line}{packed}" for line in ("", "l") for packed in ("", ".gz", ".zst"))
NEXT_PAGE = re.compile(r'<[^<>?]*\?([^<>]*)>; *rel="?next"?')


class Request(NamedTuple):
    """A request to a web server."""

    url: str  #: Address, without a user and password.
    headers: dict[str, str]  #: With credentials, which no other server is shown.
    name: str  #: The address in errors, without credentials.
    expected: str = "a readable file"  #: End of the error if the server refuses: "expected ...".
    #: Whether it belongs to a push. Then its errors repeat why the server refuses, and
    #: $HF_HUB_OFFLINE, which is about downloads, does not stop it.
    pushes: bool = False


class NotFoundError(NotFetchedError):
    """The address does not exist on the web server."""


def offline() -> bool:
    """Return whether $HF_HUB_OFFLINE forbids requests of the web."""
    return os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}


def check_online(name: str) -> None:
    """Check that requests of the web are allowed; `name` is what is asked for.

    Raises:
      UnreachableError: $HF_HUB_OFFLINE is set.
    """
    if offline():
        raise limits.UnreachableError(f"{name}: {OFFLINE} is set, expected it in the store already")


@contextmanager
def opened(
    method: str,
    request: Request,
    network: NetSettings,
    headers: dict[str, str],
    accepted: set[int] = frozenset(),
    content: bytes | None = None,
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Open a web server's answer whose body is still to come; failures inside are errors.

    `headers` are sent beside the request's own, and `content` as its body; the caller handles the
    `accepted` statuses.
    """
    if not request.pushes:
        check_online(request.name)
    name, answer = request.name, None
    authorization = request.headers.get("Authorization", request.headers.get("authorization", ""))
    keep_secret(authorization.partition(" ")[2])
    try:
        try:
            answer = _follow(method, request, network, headers, content)
        except ValueError as error:  # this address is invalid, or one that it redirects to
            raise NotFetchedError(f"{name}: {message(error)}, expected a valid address") from None
        if answer.status not in accepted:
            _check_status(request, answer, network)
        yield answer
        if answer.length_remaining == 0:
            answer.drain_conn()  # nothing is left, but until it is read the connection is in use
            answer.release_conn()
    except exceptions.SSLError as error:
        raise NotFetchedError(f"{name}: {message(error)}, expected a valid certificate") from None
    except (exceptions.HTTPError, OSError) as error:
        raise TransientError(f"{name}: {_explain(error)}") from None
    finally:
        if answer is not None and answer.length_remaining != 0:
            answer.close()  # or what is on its way would become the next answer


# ---- Redirects ----


def _follow(
    method: str,
    request: Request,
    network: NetSettings,
    headers: dict[str, str],
    content: bytes | None,
) -> urllib3.BaseHTTPResponse:
    """Return the web server's answer behind all redirects."""
    url, fields = request.url, {"Accept-Encoding": "identity"} | request.headers | headers
    if content is not None:
        fields["Content-Length"] = str(len(content))
    for _ in range(limits.REDIRECTS + 1):
        answer = _pool(network.connections, _proxy(url)).request(
            method,
            url,
            headers=fields,
            # sent in small pieces, each with a timeout; bytes would have one for the whole
            body=None if content is None else BytesIO(content),
            timeout=urllib3.Timeout(connect=limits.CONNECT_SECONDS, read=network.stall_seconds),
            retries=False,  # they are ours
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        location = answer.get_redirect_location()
        if not location:
            return answer
        _finish(answer, network.stall_seconds)
        if method not in ("GET", "HEAD"):  # what is sent is for this server alone
            raise NotFetchedError(f"{request.name}: redirects {method}, expected an answer")
        target = urljoin(url, location)
        if (urlsplit(url).scheme, urlsplit(target).scheme) == ("https", "http"):
            raise NotFetchedError(f"{request.name}: redirects to http://, expected https://")
        if urlsplit(target)[:2] != urlsplit(url)[:2]:  # another server
            fields = {key: value for key, value in fields.items() if key.lower() not in CREDENTIALS}
        url = target
    raise NotFetchedError(f"{request.name}: too many redirects, expected a file")


def _finish(answer: urllib3.BaseHTTPResponse, seconds: float) -> bytes:
    """Read a web server's small body, so that its connection can be used again, or close that."""
    content, until = b"", time.monotonic() + seconds
    try:
        while len(content) < BODY_BYTES and time.monotonic() < until:
            piece = answer.read1(BODY_BYTES - len(content))
            if not piece:
                answer.release_conn()
                return content
            content += piece
    except (exceptions.HTTPError, OSError):
        pass
    answer.close()
    return content


# ---- Headers ----


class _Headers:
    """A web server's lines of headers, as http.client reads them, within seconds and bytes."""

    def __init__(self, file: BufferedReader, seconds: float):
        self._file, self._left = file, limits.HTTP_HEADER_BYTES
        self._until = time.monotonic() + seconds
        self.close, self.flush = file.close, file.flush

    def readline(self, limit: int) -> bytes:
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            if time.monotonic() > self._until:
                raise TimeoutError
            waiting = self._file.peek(1)  # at most one look at the connection
            if not waiting:
                break
            end = waiting.find(b"\n") + 1 or len(waiting)
            line += self._file.read(min(end, limit - len(line)))
            if self._left < len(line):
                raise client.HTTPException(f"headers of over {limits.HTTP_HEADER_BYTES} bytes")
        self._left -= len(line)
        return line


class _Response(client.HTTPResponse):
    """A web server's answer whose headers are limited, without the interim ones before it."""

    def __init__(self, sock: Any, *arguments: Any, **fields: Any):
        super().__init__(sock, *arguments, **fields)
        self._seconds = sock.gettimeout()

    def begin(self) -> None:
        body = self.fp
        self.fp = _Headers(body, self._seconds)
        super().begin()  # which skips 100 Continue
        while 100 < self.status < 200:  # 103 Early Hints, for one
            self.headers = self.msg = None
            super().begin()
        self.fp = body


def _limited(pool: type[urllib3.HTTPConnectionPool]) -> type[urllib3.HTTPConnectionPool]:
    """Return a kind of connection pool whose answers are `_Response`."""
    connection = type("Limited", (pool.ConnectionCls,), {"response_class": _Response})
    return type("LimitedPool", (pool,), {"ConnectionCls": connection})


POOLS = {
    "http": _limited(urllib3.HTTPConnectionPool),
    "https": _limited(urllib3.HTTPSConnectionPool),
}


@lru_cache(maxsize=4)
def _pool(connections: int, proxy: str | None) -> urllib3.PoolManager:
    settings = {"maxsize": connections, "headers": {"User-Agent": AGENT}}
    pool = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
    pool.pool_classes_by_scheme = POOLS
    return pool


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    variables = tuple(map(os.environ.get, PROXY_VARIABLES))
    return _find_proxy(parts.scheme, parts.netloc, variables)


@lru_cache(maxsize=64)  # searching the environment takes 0.4 ms, a small file 1.1 ms
def _find_proxy(scheme: str, host: str, variables: tuple[str | None, ...]) -> str | None:
    return None if proxy_bypass(host) else getproxies().get(scheme)


# ---- What went wrong ----


def _explain(error: Exception) -> str:
    """Return why a connection to a web server failed, without the library's own objects."""
    timed_out = isinstance(error, exceptions.TimeoutError)
    if timed_out and not isinstance(error, exceptions.NewConnectionError):
        return "timed out"
    inner = next((arg for arg in error.args if isinstance(arg, Exception)), error)
    if isinstance(inner, client.BadStatusLine) and not isinstance(inner, client.RemoteDisconnected):
        return "the server does not speak HTTP"
    if isinstance(inner, client.IncompleteRead):
        return "the connection was cut"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return re.sub(r"<[^<>]*>:? ?|\w{1,99}\(host=[^()]*\): ", "", message(inner))


def _check_status(request: Request, answer: urllib3.BaseHTTPResponse, network: NetSettings) -> None:
    name = request.name
    status = f"answered {answer.status} {brief(answer.reason or '')}".rstrip()
    if answer.status in BUSY:
        raise TransientError(f"{name}: {status}", answer.headers.get("Retry-After"))
    if answer.status == 416:
        status = "changed while it was read"
    if answer.status not in (200, 206):
        reason = answer.headers.get("X-Error-Message")  # the hub's
        if request.pushes:
            reason = _store_reason(_finish(answer, network.stall_seconds))
        reason = f" ({message(Exception(reason))})" if reason else ""
        is_credentials = answer.status in (401, 403) and not request.pushes
        hint = ", or credentials for it" if is_credentials else ""
        error = NotFoundError if answer.status == 404 else NotFetchedError
        raise error(f"{name}: {status}{reason}, expected {request.expected}{hint}")


def _store_reason(content: bytes) -> str | None:
    """Return what a store says in the body of an error: Google's in JSON, S3 in XML."""
    if reason := re.search(rb"<Message>([^<]*)</Message>", content):
        return reason[1].decode(errors="replace")
    try:
        reason = json.loads(content)["error"]["message"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return reason if isinstance(reason, str) else None


# ---- Files ----


def read(
    request: Request, origin: Origin, start: int, stop: int, network: NetSettings, *, is_rest: bool
) -> Iterator[bytes]:
    """Yield the bytes of one version of a web server's file, in pieces as they come.

    `is_rest` says whether they complete what was read before, so that the answer must name the
    version.

    Raises:
      TransientError: the connection was cut or stalled, or the server is busy.
      UnnamedVersionError: it must name the version, and does not.
      NetError: the server refuses, or has another version of the file.
    """
    is_rest = is_rest and not origin.is_addressed
    if is_rest and origin.tag is None:
        raise _unnamed(request.name, None)
    headers = {} if (start, stop) == (0, origin.size) else {"Range": f"bytes={start}-{stop - 1}"}
    with opened("GET", request, network, headers) as answer:
        is_named = _check_version(request.name, answer.headers, origin)
        if is_rest and not is_named:
            raise _unnamed(request.name, origin.tag)
        skip = _check_range(request.name, answer, start, stop, origin.size)
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
            raise NetError(f"{request.name}: sends more than {origin.size} bytes, expected no more")


def head(request: Request, network: NetSettings) -> Origin:
    """Return the version of a file that the web server has now."""
    return limits.call(lambda: _head(request, network), network)


class Pages:
    """The pages of one listing on a web server, with `most_bytes` at most in all (limits.py)."""

    def __init__(self, network: NetSettings, most_bytes: int = limits.LISTING_BYTES):
        self._network, self._most_bytes = network, most_bytes
        self._limit: limits.ListingLimit | None = None  # the first page knows its name

    def get(self, request: Request) -> tuple[Any, Request | None]:
        """Return a JSON page of a web server, and the request for the page after it, if any.

        That request goes to the same server, whatever the page says: another would see its
        credentials.
        """
        content, links = self._content(request)
        document = parse(content, request.name)
        link = NEXT_PAGE.search(links)
        if link is None:
            return document, None
        return document, request._replace(url=f"{request.url.partition('?')[0]}?{link[1]}")

    def content(self, request: Request) -> bytes:
        """Return a page of a web server as it is; what it raises, `get` raises too."""
        return self._content(request)[0]

    def _content(self, request: Request) -> tuple[bytes, str]:
        """Return the content of a web server's page, within limits, and what it says of others."""
        self._limit = self._limit or limits.ListingLimit(request.name, self._most_bytes)
        self._limit.next_page(request.url)

        def fetch() -> tuple[bytes, str]:
            with opened("GET", request, self._network, {}) as answer:
                content = read_whole(answer, request.name, self._limit, self._network)
                return content, answer.headers.get("Link", "")

        content, links = limits.call(fetch, self._network)
        self._limit.received(len(content))
        return content, links


def read_whole(
    answer: urllib3.BaseHTTPResponse, name: str, limit: limits.ListingLimit, network: NetSettings
) -> bytes:
    """Return a web server's body, read into memory, up to one byte more than the limit allows.

    Raises:
      TransientError: the connection was cut or stalled.
      NetError: it takes too long.
    """
    content, room = bytearray(), limit.room
    for piece in _paced(answer, room + 1, name, network):
        content += piece
        limit.received(0)  # checks the time
    length = _length(answer.headers)
    if length is not None and len(content) < min(length, room + 1):
        raise TransientError(f"{name}: received {len(content)} bytes, expected {length}")
    return bytes(content)


def _paced(
    answer: urllib3.BaseHTTPResponse, most: int, name: str, network: NetSettings
) -> Iterator[bytes]:
    """Yield a web server's body, or its first `most` bytes; a server that hardly sends stalls."""
    since, received = time.monotonic(), 0
    while most and (piece := answer.read1(min(PIECE_BYTES, most))):
        most -= len(piece)
        received += len(piece)
        if (now := time.monotonic()) - since > network.stall_seconds:
            if received < limits.LEAST_BYTES:
                raise TransientError(f"{name}: {received} bytes in {now - since:.0f} s")
            since, received = now, 0
        yield piece


def _head(request: Request, network: NetSettings) -> Origin:
    # asks for a byte if need be: some servers give no length to HEAD, or do not know it
    with opened("HEAD", request, network, {}, accepted={403, 405, 501}) as answer:
        if answer.status < 300 and (size := _length(answer.headers)) is not None:
            return _describe(request, answer.headers, size)
    with opened("GET", request, network, {"Range": "bytes=0-0"}) as answer:
        headers = answer.headers
        total = re.fullmatch(f"bytes 0-0/({HEADER_NUMBER})", headers.get("Content-Range", ""))
        size = int(total[1]) if answer.status == 206 and total else _length(headers)
        if size is None or (answer.status == 206 and not total):
            raise NetError(f"{request.name}: no Content-Length, expected the file's size")
        return _describe(request, headers, size)


def _describe(request: Request, headers: Mapping[str, str], size: int) -> Origin:
    name = request.name
    _check_content(name, request.url, headers)
    tag = headers.get("ETag") or headers.get("Last-Modified")
    if tag is not None and reveals(tag):  # it would be written down
        raise NetError(f"{name}: names version {brief(repr(tag))}, expected an ETag or a date")
    return Origin(url=request.url, size=size, tag=tag, checksum=_checksum(name, headers))


def _length(headers: Mapping[str, str]) -> int | None:
    """Return a web server's Content-Length if it is a number."""
    number = re.fullmatch(HEADER_NUMBER, headers.get("Content-Length", ""))
    return int(number[0]) if number else None


def _checksum(name: str, headers: Mapping[str, str]) -> str | None:
    """Return the checksum that Google's storage sends over the web with a file."""
    header = headers.get("x-goog-hash", "")
    hashes = dict(pair.strip().partition("=")[::2] for pair in header.split(","))
    for kind, size in SIZES.items():
        with suppress(ValueError):  # invalid base64
            if digest := b64decode(hashes.get(kind, "")):
                if len(digest) != size:
                    value = brief(repr(header))
                    raise NetError(f"{name}: x-goog-hash {value}, expected {size} bytes")
                return f"{kind}:{digest.hex()}"
    return None


# ---- Which version, and which bytes of it ----


def _check_version(name: str, headers: Mapping[str, str], origin: Origin) -> bool:
    """Check that a web server's answer is of no other version; return whether it says so."""
    _check_content(name, origin.url, headers)
    if origin.tag is None or origin.is_addressed:
        return False
    is_date = re.match(r"\w{3}, \d", origin.tag)  # where the server gave no ETag
    tag = headers.get("Last-Modified" if is_date else "ETag")
    if tag is not None and _bare(tag) != _bare(origin.tag):
        raise NetError(
            f"{name}: changed while it was read: version {brief(repr(tag))}, expected "
            f"{brief(repr(origin.tag))}; run again to read it anew"
        )
    return tag is not None


def _unnamed(name: str, tag: str | None) -> limits.UnnamedVersionError:
    expected = "an ETag or a date" if tag is None else f"{brief(repr(tag))} as before"
    return limits.UnnamedVersionError(
        f"{name}: the server does not say which version of the file a part belongs to, expected "
        f"{expected}"
    )


def _check_range(
    name: str, answer: urllib3.BaseHTTPResponse, start: int, stop: int, size: int
) -> int:
    """Check that a web server's answer holds the range; return how many bytes precede it."""
    headers = answer.headers
    if answer.status == 200:  # the whole file, even if a range was requested
        length = _length(headers)
        if length is not None and length != size:
            raise NetError(f"{name}: sends {length} bytes, expected {size} as before")
        return start
    text = headers.get("Content-Range", "")
    match = re.fullmatch(rf"bytes ({HEADER_NUMBER})-({HEADER_NUMBER})/({HEADER_NUMBER}|\*)", text)
    if match is None or (int(match[1]), int(match[2])) != (start, stop - 1):
        raise NetError(
            f"{name}: sends range {brief(repr(text))}, expected bytes {start}-{stop - 1}"
        )
    if match[3] not in ("*", str(size)):
        raise NetError(f"{name}: has {match[3]} bytes, expected {size} as before")
    return 0


def _check_content(name: str, url: str, headers: Mapping[str, str]) -> None:
    """Check that a web server's body is the file itself: no sign-in page, not compressed."""
    mime = headers.get("Content-Type", "").partition(";")[0].strip()
    kind = mime.lower()  # not shown: in lower case a secret would not be hidden
    is_itself = kind.endswith("json") and urlsplit(url).path.lower().endswith(JSON_ENDINGS)
    if kind.endswith(PAGE_TYPES) and not is_itself:
        raise NetError(
            f"{name}: sends a web page ({brief(mime)}), expected the file itself; does the server "
            "want a sign-in?"
        )
    encoding = headers.get("Content-Encoding", "identity").strip()
    if encoding.lower() != "identity":
        raise NetError(f"{name}: sent as {brief(encoding)}, expected plain bytes")


def _bare(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')
