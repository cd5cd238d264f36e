"""What a server can do wrong, each as a function of an answer: the matrix of faults is made of it.

`server.faults.append(Misbehaviour(cut, times=2, where="a.ds"))`: two downloads of a.ds are cut.
"""

import gzip
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import formatdate

from tests.servers.web import Answer

Spoil = Callable[[Answer], Answer]

NOT_HTTP = b"\x00\xff SSH-2.0-OpenSSH_9.6\r\n\r\n"
PAGE = b"<!doctype html><title>Sign in</title><p>Please sign in to this network.</p>\n"
COUNT = itertools.count()


@dataclass
class Misbehaviour:
    """One thing that goes wrong, for some requests.

    Attributes:
      spoil: answer -> the answer that is sent in its place.
      times: how often; None: always.
      where: pattern of "METHOD /path?query".
      after: how many such requests are answered as they should be before.
      hits: how often it went wrong.
    """

    spoil: Spoil
    times: int | None = None
    where: str = "^GET "
    after: int = 0
    hits: int = 0

    def __call__(self, asked: str, answer: Answer) -> Answer:
        if not re.search(self.where, asked, re.DOTALL):
            return answer
        if self.after:
            self.after -= 1
            return answer
        if self.times is not None and self.hits >= self.times:
            return answer
        self.hits += 1
        return self.spoil(answer)


# ---- The connection ----


def refused(answer: Answer) -> Answer:
    """Ends the connection without a word."""
    return replace(answer, status=0, body=b"", then="reset")


def silent(answer: Answer) -> Answer:
    """Says nothing, and keeps the connection."""
    return replace(answer, status=0, body=b"", then="stall")


def not_http(answer: Answer) -> Answer:
    """Speaks another protocol."""
    return replace(answer, status=0, body=NOT_HTTP, then="close")


def dropped(answer: Answer) -> Answer:
    """Breaks the connection in the middle of the body."""
    return replace(answer, body=_half(answer), then="reset")


def truncated(answer: Answer) -> Answer:
    """Ends the connection in order after half of what Content-Length says."""
    return replace(answer, body=_half(answer), then="close")


def stalled(answer: Answer) -> Answer:
    """Sends half of the body and no more, and keeps the connection."""
    return replace(answer, body=_half(answer), then="stall")


def trickling(answer: Answer) -> Answer:
    """Sends a byte now and then, so that no wait between two is long, and ends after some."""
    return replace(answer, body=answer.body[:200], pause=0.05, then="close")


# ---- The headers ----


def hinted(answer: Answer) -> Answer:
    """Says 100 and 103 first, as a server may."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    return replace(answer, before=interim)


def always_100(answer: Answer) -> Answer:
    """Says 100 Continue without end."""
    return replace(answer, status=0, body=b"HTTP/1.1 100 Continue\r\n\r\n" * 99, then="flood")


def long_headers(answer: Answer) -> Answer:
    """Says headers without end."""
    return replace(answer, status=0, body=b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10**5)


def slow_headers(answer: Answer) -> Answer:
    """Says its headers by a byte now and then, so that no wait between two is long."""
    return replace(answer, status=0, body=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 180, pause=0.05)


# ---- The status ----


def status(code: int, retry_after: str | None = None) -> Spoil:
    """Answers with a status and, where that is given, when to come again."""

    headers = {} if retry_after is None else {"Retry-After": retry_after}
    body = b"Come again later.\n" if code != 204 else b""
    return _instead(code, body, {"Content-Type": "text/plain"} | headers)


def soon() -> str:
    """Retry-After as a date, which knows no fractions: in two to three seconds."""
    return formatdate(time.time() + 3, usegmt=True)


def redirected(address: str | None = None) -> Spoil:
    """Sends the client to an address; None: to where it came from, without end."""

    def spoil(answer: Answer) -> Answer:
        headers = {"Content-Length": "0", "Location": answer.path if address is None else address}
        return replace(answer, status=302, headers=headers, body=b"", name=None)

    return spoil


def endless_redirect(answer: Answer) -> Answer:
    """Sends the client to where it came from, with a body that has no end."""
    headers = {"Location": answer.path}
    return replace(answer, status=302, headers=headers, body=b"x" * 2**12, name=None, then="flood")


def page_after_page(answer: Answer) -> Answer:
    """Answers with an empty page of a listing, which says that there is another."""
    headers = {"Content-Length": "2", "Link": f'<{answer.path}?{next(COUNT)}>; rel="next"'}
    return replace(answer, headers=answer.headers | headers, body=b"[]")


def itself_again(answer: Answer) -> Answer:
    """Says of a page of a listing that it is followed by itself."""
    return replace(answer, headers=answer.headers | {"Link": f'<{answer.path}>; rel="next"'})


def sign_in(kind: str | None = "text/html") -> Spoil:
    """Answers with a page, as a network does that one has to sign in to; to HEAD as to GET."""

    return _instead(200, PAGE, {"Content-Type": kind} if kind else {})


# ---- The length ----


def shorter(answer: Answer) -> Answer:
    """Says and sends half of it, as if that were all."""
    return _resized(answer, _half(answer))


def longer(answer: Answer) -> Answer:
    """Says and sends more than there is."""
    return _resized(answer, bytes(answer.body) + b"more")


def too_much(answer: Answer) -> Answer:
    """Sends more than Content-Length says, on a connection that stays open."""
    return replace(answer, body=bytes(answer.body) + b"HTTP/1.1 200 OK\r\n\r\n")


def endless(answer: Answer) -> Answer:
    """Says no length, and never stops."""
    return replace(answer, headers=_without_length(answer), then="flood")


def chunked(answer: Answer) -> Answer:
    """Says no length, and sends the body in chunks."""
    headers = _without_length(answer) | {"Transfer-Encoding": "chunked"}
    half = len(answer.body) // 2
    body = b""
    for part in (bytes(answer.body[:half]), bytes(answer.body[half:])):
        body += b"%x\r\n%s\r\n" % (len(part), part) if part else b""
    return replace(answer, headers=headers, body=body + b"0\r\n\r\n")


def no_length(answer: Answer) -> Answer:
    """Says no length, and ends the connection after the body."""
    return replace(answer, headers=_without_length(answer), then="close")


def other_size(times: float) -> Spoil:
    """Says another size, to HEAD, which gets no body."""

    def spoil(answer: Answer) -> Answer:
        size = int(int(answer.headers["Content-Length"]) * times)
        return replace(answer, headers=answer.headers | {"Content-Length": str(size)})

    return spoil


# ---- The bytes ----


def whole(answer: Answer) -> Answer:
    """Ignores Range."""
    size = len(answer.whole)
    headers = {k: v for k, v in answer.headers.items() if k != "Content-Range"}
    headers = headers | {"Content-Length": str(size), "Accept-Ranges": "none"}
    return replace(answer, status=200, headers=headers, body=answer.whole)


def other_range(answer: Answer) -> Answer:
    """Sends a range that starts 8 bytes earlier, and says so; the whole file goes as it should."""
    said = answer.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
    if found is None or int(found[1]) < 8:
        return answer
    first, last, size = int(found[1]) - 8, int(found[2]) - 8, found[3]
    headers = answer.headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
    return replace(answer, headers=headers, body=answer.whole[first : last + 1])


def flipped(answer: Answer) -> Answer:
    """Flips a bit in the middle of the body."""
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    return replace(answer, body=bytes(body))


def identity(answer: Answer) -> Answer:
    """Says that the body is as it is."""
    return replace(answer, headers=answer.headers | {"Content-Encoding": "Identity"})


def compressed(answer: Answer) -> Answer:
    """Sends the body compressed, whether or not that is accepted, and says so."""
    body = gzip.compress(bytes(answer.body), mtime=0)
    headers = {"Content-Length": str(len(body)), "Content-Encoding": "gzip"}
    return replace(answer, headers=answer.headers | headers, body=body)


def other_tag(answer: Answer) -> Answer:
    """Says another ETag each time, of the same bytes."""
    return replace(answer, headers=answer.headers | {"ETag": f'"other-{next(COUNT)}"'})


def other_hash(answer: Answer) -> Answer:
    """Says a checksum of MD5 that is far longer than any is."""
    return replace(answer, headers=answer.headers | {"X-Goog-Hash": "md5=" + "YWJj" * 500})


def untagged(answer: Answer) -> Answer:
    """Says nothing of which version it is."""
    return replace(answer, headers={k: v for k, v in answer.headers.items() if k != "ETag"})


def meanwhile(happen: Callable[[], object]) -> Spoil:
    """Something happens on the server while a connection breaks."""

    def both(answer: Answer) -> Answer:
        answer = dropped(replace(answer, body=bytes(answer.body)))
        happen()
        return answer

    return both


def _instead(code: int, body: bytes, headers: dict[str, str]) -> Spoil:
    headers = {"Content-Length": str(len(body))} | headers
    return lambda answer: replace(answer, status=code, headers=headers, body=body, name=None)


def _half(answer: Answer) -> bytes | memoryview:
    return answer.body[: (len(answer.body) + 1) // 2]  # so that each attempt brings something


def _resized(answer: Answer, body: bytes | memoryview) -> Answer:
    headers = answer.headers | {"Content-Length": str(len(body))}
    if found := re.fullmatch(r"bytes (\d+)-.*", headers.get("Content-Range", "")):
        end = int(found[1]) + len(body)
        headers["Content-Range"] = f"bytes {found[1]}-{end - 1}/{end}"
    return replace(answer, headers=headers, body=body)


def _without_length(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name != "Content-Length"}
