"""One request to a web server, with a limit on everything that a server could do without end.

Headers, interim answers before them included, have as long as a stall and HTTP_HEADER_BYTES.
Redirects are followed here, since urllib3 would read the body of each to its end, and credentials
are shown to no other server. The body's pace and size are the caller's to limit.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.client import (
    BadStatusLine,
    HTTPException,
    HTTPResponse,
    IncompleteRead,
    RemoteDisconnected,
)
from io import BufferedReader, BytesIO
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import connection, exceptions

from lockstep import __version__
from lockstep.errors import brief, keep_secret
from pipeline.net.limits import CONNECT_SECONDS, HTTP_HEADER_BYTES, REDIRECTS
from pipeline.net.redact import message
from pipeline.net.retry import NotFetchedError, TransientError, UnreachableError
from pipeline.runfile import Network

BUSY = {408, 425, 429, 500, 502, 503, 504}  # statuses after which a request may be repeated
CREDENTIALS = {"authorization", "cookie", "proxy-authorization"}  # headers for one server
BODY_BYTES = 2**16  # at most, read of the body of a redirect or an error
OFFLINE = "HF_HUB_OFFLINE"
PROXY_VARIABLES = [
    spelling
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
]


class Request(NamedTuple):
    """A request to a server.

    Attributes:
      url: address, without a user and password.
      headers: with credentials, which no other server is shown.
      name: the address in errors, without credentials.
      expected: end of the error if the server refuses: "expected ...".
      pushes: whether it belongs to a push. Then its errors repeat why the server refuses, and
        $HF_HUB_OFFLINE, which is about downloads, does not stop it.
    """

    url: str
    headers: dict[str, str]
    name: str
    expected: str = "a readable file"
    pushes: bool = False


class NotFoundError(NotFetchedError):
    """The address does not exist."""


def offline() -> bool:
    """Return whether $HF_HUB_OFFLINE forbids requests."""
    return os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}


def check_online(name: str) -> None:
    """Check that requests are allowed; `name` is what is asked for.

    Raises:
      UnreachableError: $HF_HUB_OFFLINE is set.
    """
    if offline():
        raise UnreachableError(f"{name}: {OFFLINE} is set, expected it in the store already")


@contextmanager
def opened(
    method: str,
    request: Request,
    network: Network,
    headers: dict[str, str],
    accepted: set[int] = frozenset(),
    content: bytes | None = None,
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Open an answer whose body is still to come; failures inside are TransientError or an error.

    `headers` are sent beside the request's own, and `content` as its body; the caller handles the
    `accepted` statuses.
    """
    if not request.pushes:
        check_online(request.name)
    name, answer = request.name, None
    said = request.headers.get("Authorization", request.headers.get("authorization", ""))
    keep_secret(said.partition(" ")[2])
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
    method: str, request: Request, network: Network, headers: dict[str, str], content: bytes | None
) -> urllib3.BaseHTTPResponse:
    """Return the answer behind all redirects."""
    url, said = request.url, {"Accept-Encoding": "identity"} | request.headers | headers
    if content is not None:
        said["Content-Length"] = str(len(content))
    for _ in range(REDIRECTS + 1):
        answer = _pool(network.connections, _proxy(url)).request(
            method,
            url,
            headers=said,
            # sent in small pieces, each with a timeout; bytes would have one for the whole
            body=None if content is None else BytesIO(content),
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=network.stall_seconds),
            retries=False,  # they are ours
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        location = answer.get_redirect_location()
        if not location:
            return answer
        _finish(answer, network.stall_seconds)
        target = urljoin(url, location)
        if _server(target) != _server(url):
            said = {key: value for key, value in said.items() if key.lower() not in CREDENTIALS}
        url = target
    raise NotFetchedError(f"{request.name}: too many redirects, expected a file")


def _server(url: str) -> tuple[str, str]:
    return urlsplit(url)[:2]


def _finish(answer: urllib3.BaseHTTPResponse, seconds: float) -> bytes:
    """Read a small body, so that its connection can be used again, or close that; return it."""
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
    """The lines of headers, as http.client reads them: in so many seconds and bytes."""

    def __init__(self, file: BufferedReader, seconds: float):
        self._file, self._until, self._left = file, time.monotonic() + seconds, HTTP_HEADER_BYTES
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
                raise HTTPException(f"headers of over {HTTP_HEADER_BYTES} bytes")
        self._left -= len(line)
        return line


class _Response(HTTPResponse):
    """An answer whose headers are limited, without the interim ones before it."""

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


class _Plain(connection.HTTPConnection):
    response_class = _Response


class _Tls(connection.HTTPSConnection):
    response_class = _Response


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Tls


@lru_cache(maxsize=4)
def _pool(connections: int, proxy: str | None) -> urllib3.PoolManager:
    settings = {"maxsize": connections, "headers": {"User-Agent": f"lockstep/{__version__}"}}
    pool = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
    pool.pool_classes_by_scheme = {"http": _PlainPool, "https": _TlsPool}
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
    return re.sub(r"<[^<>]*>:? ?|\w{1,99}\(host=[^()]*\): ", "", message(inner))


def _check_status(request: Request, answer: urllib3.BaseHTTPResponse, network: Network) -> None:
    name = request.name
    status = f"answered {answer.status} {brief(answer.reason or '')}".rstrip()
    if answer.status in BUSY:
        raise TransientError(f"{name}: {status}", answer.headers.get("Retry-After"))
    if answer.status == 416:
        status = "changed while it was read"
    if answer.status not in (200, 206):
        reason = answer.headers.get("X-Error-Message")  # the hub's
        if request.pushes:
            reason = _google_reason(_finish(answer, network.stall_seconds))
        reason = f" ({message(Exception(reason))})" if reason else ""
        is_credentials = answer.status in (401, 403) and not request.pushes
        hint = ", or credentials for it" if is_credentials else ""
        error = NotFoundError if answer.status == 404 else NotFetchedError
        raise error(f"{name}: {status}{reason}, expected {request.expected}{hint}")


def _google_reason(content: bytes) -> str | None:
    """Return what Google's storage says in the body of an error."""
    try:
        said = json.loads(content)["error"]["message"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return said if isinstance(said, str) else None
