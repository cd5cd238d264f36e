"""The exception for everything a user can fix, and what is shown of others' words.

A server, a file or a run file may say anything: credentials that were sent to it, codes that steer
a terminal, a line break and a line that looks like ours. `shown` makes one harmless line of it;
every error and every line of a log goes through it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from urllib.parse import quote

PANIC = "PanicException"  # raised by libraries in Rust, and no subclass of Exception
HIDDEN = "..."
LEAST_SECRET = 4  # characters of a secret: a shorter one would hide half of every text
CERTAIN_SECRET = 8  # characters of a secret that is in no text by chance
LONGEST, END = 1200, 400  # characters of an error, and of its end, which says what was expected
BOUND = 4096  # characters of a longer text, at either end, that are looked at to show some of it
BEFORE_CREDENTIALS = re.compile(r"(?i)\b(bearer|basic)\Z")
_secrets: set[str] = set()


class LockstepError(Exception):
    """The error of a problem that the user can fix.

    Its message is one line: the file, key or tensor, the value found, and what was expected. The
    command line prints it without a traceback and exits with status 1. Whatever checks or reads
    something may raise it; a docstring says so where its first line leaves open why.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > 2 * BOUND:  # it echoes a value whole
            text = f"{_beginning(text)}{HIDDEN}{_end(text)}"
        line = shown(text)
        if len(line) > LONGEST:
            line = line[: LONGEST - END - len(HIDDEN)] + HIDDEN + line[-END:]
        return line


class DivergedError(LockstepError):
    """The error of a training that diverged: its loss, or every message, is not finite."""

    status = 5  # of the process, and of no other error's


class StepError(LockstepError):
    """The error of a peer that could not take its step; others can go on without it."""


class UnfinishedError(LockstepError):
    """The error of work that this machine stopped, as by its memory: the target is not judged."""


class RequestError(LockstepError):
    """The error of a user's request that cannot be met, though nothing is wrong with its target."""


@contextmanager
def expecting(where: object, expected: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, by default the system's, into one line: where, why, expected.

    Raises:
      LockstepError: There is one; `expected` completes "expected ...".
    """
    kinds = kinds or (OSError,)
    try:
        yield
    except kinds as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise LockstepError(f"{where}: {why}, expected {expected}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or its kind if it says nothing."""
    return brief(str(error).partition("\n")[0] or type(error).__name__, 200)


def keep_secret(*secrets: str | None) -> None:
    """Hide these secrets in what errors show from now on, also as an address or JSON has them."""
    for secret in secrets:
        if secret and len(secret) >= LEAST_SECRET:
            bare = secret.rstrip("=")  # base64, as some write it
            spellings = (bare, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
            _secrets.update(text for text in (secret, *spellings) if len(text) >= LEAST_SECRET)


def reveals(text: str) -> bool:
    """Return whether an error's text has a kept secret, one too long to be there by chance."""
    certain = tuple(secret for secret in tuple(_secrets) if len(secret) >= CERTAIN_SECRET)
    return _any_of(certain).search(text) is not None


def hide(text: str) -> str:
    """Return an error's text without secrets, in whatever case their letters are.

    Hides those that are kept, users, passwords and queries in addresses, and what signs a request.
    It takes time in proportion to the text, whatever that says: no two of a pattern's matches, the
    attempts included, begin in the same stretch.
    """
    text = _secret_pattern().sub(HIDDEN, text)
    text = re.sub(r"(?i)\b(bearer|basic)[ :]+\S+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"(?i)\b(credential|signature)=[^\s,;&]+", rf"\1={HIDDEN}", text)
    return without_credentials(text)


def without_credentials(text: str) -> str:
    """Return an error's text whose addresses have neither user, password nor a query."""
    text = re.sub(r"(\w://)[^/\s?#]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#]*)([?#]\S+)?", _without_query, text)


def _without_query(address: re.Match[str]) -> str:
    return f"{address[1]}{address[2][0]}{HIDDEN}" if address[2] else address[1]


def _secret_pattern() -> re.Pattern[str]:
    """Return a regular expression of the secrets that errors hide."""
    return _any_of(tuple(_secrets))


@lru_cache(maxsize=4)
def _any_of(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Return a regular expression of any of these secrets, the longest first; of none: nothing."""
    longest = sorted(secrets, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)", re.IGNORECASE)


def shown(text: str) -> str:
    """Return a text for an error: one line without secrets, in which nothing steers a terminal."""
    text = hide(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def brief(text: str, width: int = 60) -> str:
    """Return the beginning of `shown`, for an error, in which no secret is cut in two."""
    line = shown(_beginning(text))
    if len(line) <= width and len(text) <= BOUND:
        return line
    return line[: width - len(HIDDEN)] + HIDDEN


def _beginning(text: str) -> str:
    """Return the beginning of an error's long text, up to where a secret would be cut in two."""
    if len(text) <= BOUND:
        return text
    stop, longest = BOUND, max(map(len, _secrets), default=0)
    for secret in _secret_pattern().finditer(text, 0, stop + longest):
        if secret.start() < stop < secret.end():
            stop = secret.start()
    return re.sub(r"(\w://)[^/\s?#]*\Z", r"\1", text[:stop])  # maybe a password before its @


def _end(text: str) -> str:
    """Return the end of an error's long text, which begins after a word and cuts no secret."""
    start, longest = len(text) - BOUND, max(map(len, _secrets), default=0)
    word = re.compile(r"\s|\Z").search(text, start)  # the text before it may be a query's
    start = word.start() if word else len(text)
    for secret in _secret_pattern().finditer(text, max(0, start - longest)):
        if secret.start() < start < secret.end():
            start = secret.end()
    if BEFORE_CREDENTIALS.search(text[:start].rstrip(" :")[-8:]):
        return re.sub(r"\A[\s:]*\S*", "", text[start:])
    return text[start:]
