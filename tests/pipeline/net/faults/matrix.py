"""What servers do wrong, and what comes of it with each kind of server.

The rows of MATRIX are the tables of docs/reference/network-faults.md.
"""

from dataclasses import dataclass
from functools import partial

from tests.servers import misbehaviour as m
from tests.servers.misbehaviour import Misbehaviour, Spoil

RIGHT = ""  # the bytes come right
AGAIN = "expected 40004 more bytes within 3 attempts; run again to resume"
INVALID = "expected a valid address"
CHANGED = "changed while it was read"
UNNAMED = {
    "plain": "does not say which version of the file a part belongs to",
    "hub": RIGHT,
    "bucket": RIGHT,
}
NO_ANSWER = "expected an answer within 3 attempts; run again"
YEAR = str(365 * 24 * 3600)


@dataclass
class Row:
    """What a server does wrong, and what comes of it."""

    what: str  #: In words.
    faults: list[Misbehaviour]  #: The same, in code.
    #: RIGHT, or words of the error; of the kinds of servers, where that differs.
    comes: str | dict[str, str]
    #: Of the "bytes" of a file, or of the "listing": of a plain server, a file's HEAD.
    where: str = "bytes"
    pinned: bool = False  #: Whether `[pins] data` names the right bytes.

    def of(self, kind: str) -> str | None:
        """What comes of it with a kind of server; None: it has no such answers."""
        return self.comes.get(kind) if isinstance(self.comes, dict) else self.comes


def always(spoil: Spoil, times: int | None = None) -> list[Misbehaviour]:
    return [Misbehaviour(spoil, times)]


once, twice = partial(always, times=1), partial(always, times=2)


def cut_then(spoil: Spoil) -> list[Misbehaviour]:
    """The first answer is cut, so that the rest is asked for."""
    return [Misbehaviour(m.dropped, times=1), Misbehaviour(spoil, after=1)]


WRONG = {"hub": "received sha256:", "bucket": "received md5:"}
PINNED = {"plain": "[pins] data = "}

MATRIX = [
    # ---- The connection ----
    Row("ends the connection without a word, twice", twice(m.refused), RIGHT),
    Row("ends the connection without a word, always", always(m.refused), AGAIN),
    Row("breaks the connection half way, always", always(m.dropped), RIGHT),
    Row("ends the answer half way, always", always(m.truncated), RIGHT),
    Row("stalls half way, twice", twice(m.stalled), RIGHT),
    Row("says nothing, twice", twice(m.silent), RIGHT),
    Row("sends a byte now and then, once", once(m.trickling), RIGHT),
    Row("speaks no HTTP, twice", twice(m.not_http), RIGHT),
    Row("speaks no HTTP, always", always(m.not_http), f"does not speak HTTP, {AGAIN}"),
    # ---- The headers ----
    Row("says 100 Continue and 103 Early Hints first, always", always(m.hinted), RIGHT),
    Row("says 100 Continue without end, once", once(m.always_100), RIGHT),
    Row("says 100 Continue without end, always", always(m.always_100), {"plain": AGAIN}),
    Row("sends headers without end, always", always(m.long_headers), {"plain": "more than 100"}),
    Row("sends a byte of its headers now and then, once", once(m.slow_headers), {"plain": RIGHT}),
    # ---- The status ----
    Row("answers 429, twice", twice(m.status(429)), RIGHT),
    Row("answers 429 with Retry-After, twice", twice(m.status(429, "1")), RIGHT),
    Row("answers 500, twice", twice(m.status(500)), RIGHT),
    Row("answers 503, twice", twice(m.status(503)), RIGHT),
    Row("answers 503, always", always(m.status(503)), f"answered 503 Service Unavailable, {AGAIN}"),
    Row("answers 503 with a date in Retry-After, twice", twice(m.status(503, m.soon())), RIGHT),
    Row("answers 503 with nonsense in Retry-After, twice", twice(m.status(503, "soon")), RIGHT),
    Row("answers 503, come again in a year, always", always(m.status(503, YEAR)), AGAIN),
    Row("answers 403", once(m.status(403)), "answered 403 Forbidden"),
    Row("answers 404", once(m.status(404)), "answered 404 Not Found"),
    Row("answers 204", once(m.status(204)), "answered 204 No Content"),
    Row("answers 416 to a resumption", cut_then(m.status(416)), CHANGED),
    Row("redirects in a loop", always(m.redirected()), "too many redirects"),
    Row("redirects, with a body without end, once", once(m.endless_redirect), RIGHT),
    Row("redirects to a file", once(m.redirected("file:///etc/passwd")), INVALID),
    Row("redirects to ftp://", once(m.redirected("ftp://h/a")), "Not supported URL scheme ftp"),
    Row("redirects to nonsense", once(m.redirected("http://[::")), INVALID),
    Row("sends a page to sign in", once(m.sign_in()), "sends a web page (text/html)"),
    Row("sends a page, spelled otherwise", once(m.sign_in("TEXT/HTML; x")), "sends a web page"),
    Row("sends a page of XHTML", once(m.sign_in("application/xhtml+xml")), "sends a web page"),
    # ---- The length ----
    Row("says and sends half of the file", once(m.shorter), "sends 20002 bytes, expected 40004"),
    Row("says and sends more than the file", once(m.longer), "sends 40008 bytes, expected 40004"),
    Row("sends more than it says", always(m.too_much), RIGHT),
    Row("says no length", always(m.no_length), RIGHT),
    Row("sends in chunks", always(m.chunked), RIGHT),
    Row("answers a resumption with half of the rest", cut_then(m.shorter), "sends range"),
    # ---- The bytes ----
    Row("ignores Range", cut_then(m.whole), RIGHT),
    Row("answers with another range", cut_then(m.other_range), "sends range"),
    Row("sends wrong bytes, once", once(m.flipped), dict.fromkeys(WRONG, RIGHT)),
    Row("sends wrong bytes, always", always(m.flipped), WRONG),
    Row("sends wrong bytes, pinned data", once(m.flipped), PINNED, pinned=True),
    Row("says that nothing is compressed", always(m.identity), RIGHT),
    Row("compresses what it sends", always(m.compressed), "sent as gzip, expected plain bytes"),
    Row("says another ETag", once(m.other_tag), {"hub": RIGHT, "bucket": RIGHT, "plain": CHANGED}),
    Row("names no version of the rest, once", cut_then(m.untagged), RIGHT),
    Row("names no version, and is always cut", [*always(m.untagged), *always(m.dropped)], UNNAMED),
    # ---- What there is ----
    Row("of what there is: says nothing, twice", twice(m.silent), RIGHT, "listing"),
    Row("of what there is: answers 503, twice", twice(m.status(503)), RIGHT, "listing"),
    Row("of what there is: answers 503, always", always(m.status(503)), NO_ANSWER, "listing"),
    Row("of what there is: come in a year", always(m.status(429, YEAR)), NO_ANSWER, "listing"),
    Row("of what there is: answers 404", once(m.status(404)), "answered 404", "listing"),
    Row("of what there is: a loop", always(m.redirected()), "too many redirects", "listing"),
    Row(
        "of what there is: cut short, always",
        always(m.truncated),
        {"hub": f"the connection was cut, {NO_ANSWER}", "bucket": NO_ANSWER},
        "listing",
    ),
    Row(
        "of what there is: a page to sign in",
        once(m.sign_in()),
        {"plain": "sends a web page", "hub": "expected JSON", "bucket": "expected JSON"},
        "listing",
    ),
    Row("HEAD says half of the size", once(m.other_size(0.5)), {"plain": "as before"}, "listing"),
    Row("HEAD says twice the size", once(m.other_size(2)), {"plain": "as before"}, "listing"),
    Row("HEAD says no length", once(m.no_length), {"plain": RIGHT}, "listing"),
    Row("HEAD says a long checksum", once(m.other_hash), {"plain": "expected 16 bytes"}, "listing"),
    Row("HEAD is not allowed", always(m.status(405)), {"plain": RIGHT}, "listing"),
]
