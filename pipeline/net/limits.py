"""What a server may cost, whoever speaks to it: seconds, pages, bytes and attempts.

web.py holds web servers, the hub and Google's storage to these, fsspec_files.py every other store.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import ClassVar, Protocol, TypeVar

from urllib3 import Retry
from urllib3.exceptions import HTTPError, MaxRetryError

from .errors import BadRequestError, NetError, brief

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
LEAST_BYTES = 2**10  # in `stall_seconds`: a server that sends less has stalled
HTTP_HEADER_BYTES = 2**18  # the most that all headers of an answer may have, interim ones included
REDIRECTS = 10  # the most that are followed
# The most that all pages of a listing may take, which are read into memory.
LISTING_BYTES, LISTING_PAGES = 2**26, 10_000
BACKOFF_SECONDS, JITTER_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 0.5, 30.0
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class NetSettings:
    """What limits requests, as a program wants it; any object with these attributes will do."""

    connections: int = 8  #: Requests at once.
    #: Failures in a row, each with next to nothing received, after which one gives up.
    attempts: int = 8
    stall_seconds: float = 30.0  #: Seconds without an answer or 1 KiB that are a failure.
    cache_bytes: int = 256_000_000  #: Memory for streamed files.


class Bar(Protocol):
    """What shows how far a transfer is."""

    def advance(self, count: int) -> None:
        """Count bytes of a transfer."""


class ListingLimit:
    """What one listing, `name` in errors, has cost: all its pages have `most_bytes` at most.

    Attributes:
      seconds: The most that all its pages may take.
    """

    seconds = 600.0

    def __init__(self, name: str, most_bytes: int = LISTING_BYTES):
        self._name, self._pages, self._bytes, self._most_bytes = name, 0, 0, most_bytes
        self._until = time.monotonic() + self.seconds
        self._asked: set[str] = set()

    @property
    def room(self) -> int:
        """Bytes that are left of the limit."""
        return self._most_bytes - self._bytes

    def next_page(self, which: str) -> None:
        """Count a page of a listing against its limit; `which` is its address or token.

        Raises:
          NetError: it was asked for before, or is one too many.
        """
        self._pages += 1
        if which in self._asked:
            raise self._endless("a page that links to itself", "another page")
        if self._pages > LISTING_PAGES:
            raise self._endless(f"a listing of over {LISTING_PAGES} pages", "fewer")
        self._asked.add(which)
        self.received(0)

    def received(self, count: int) -> None:
        """Count bytes of a listing against its limit.

        Raises:
          NetError: they are too many, or come too late.
        """
        self._bytes += count
        if self._bytes > self._most_bytes:
            raise self._endless(f"a listing of over {self._most_bytes} bytes", "less")
        if time.monotonic() > self._until:
            raise self._endless(f"a listing of over {self.seconds:.4g} s", "less")

    def _endless(self, problem: str, expected: str) -> NetError:
        return NetError(f"{brief(self._name, 200)}: {problem}, expected {expected}")


class FetchLimit:
    """The most bytes that files may have which are fetched or made in a `with` block, all together.

    It is a reader's, for files that a stranger names: a pin is compared only once a file is here.
    Each counts once, by its address, with as many bytes as are asked for, before any of them comes.
    """

    _open: ClassVar[list["FetchLimit"]] = []  # of the process: files are fetched by many threads

    def __init__(self, most: int, remedy: str):
        self.most, self._remedy, self._sizes = most, remedy, dict[str, int]()

    def __enter__(self) -> None:
        self._open.append(self)

    def __exit__(self, *_: object) -> None:
        self._open.remove(self)

    @classmethod
    def count(cls, sizes: Mapping[str, int]) -> None:
        """Count files against the limit, by their addresses, that are fetched next.

        Raises:
          BadRequestError: They would be too many bytes with those before.
        """
        for limit in cls._open:
            for address, size in sizes.items():
                limit._sizes[address] = max(size, limit._sizes.get(address, 0))
            if (total := sum(limit._sizes.values())) > limit.most:
                raise BadRequestError(
                    f"{brief(next(iter(sizes)), 200)}: would make {total:,} bytes of files, "
                    f"expected at most {limit.most:,}; {limit._remedy}"
                )


# ---- Attempts ----


@contextmanager
def logging_attempts() -> Iterator[None]:
    """Log each attempt that fails in the block, for a user who waits at a terminal."""
    before = log.level
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(before)


class TransientError(Exception):
    """A failure after which attempts go on: a connection cut or stalled, a busy server.

    The message is one line without credentials; `retry_after` is the server's Retry-After header.
    """

    def __init__(self, message: str, retry_after: str | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class NotFetchedError(NetError):
    """A server refused, or none answered, so nothing is known about the file."""


class UnreachableError(NotFetchedError):
    """No server answered, or the process is offline: nothing contradicts anything."""


class UnnamedVersionError(NetError):
    """The rest of a file may be of another version, since the server names none."""


class CancelledError(Exception):
    """The caller of a request no longer needs the result."""


class Attempts:
    """Counts failures in a row, and waits after each.

    urllib3's back-off: 0 s, then 0.5 s * 2**(failures - 1) plus up to 0.5 s of jitter, at most
    30 s; or what the server's Retry-After asks for, at most 30 s. `network.attempts` failures in a
    row are the last; `cancelled` ends a wait.
    """

    def __init__(self, network: NetSettings, cancelled: Event | None = None):
        self._all = self._left = Retry(
            network.attempts - 1,
            backoff_factor=BACKOFF_SECONDS,
            backoff_jitter=JITTER_SECONDS,
            backoff_max=LONGEST_WAIT_SECONDS,
            retry_after_max=LONGEST_WAIT_SECONDS,
        )
        self._cancelled = cancelled or Event()

    def check(self) -> None:
        """Raise CancelledError if the caller has given up."""
        if self._cancelled.is_set():
            raise CancelledError

    def progressed(self) -> None:
        """Forget earlier failed attempts: something arrived."""
        self._left = self._all

    def failed(self, error: TransientError, expected: str) -> None:
        """Wait until the next attempt after a failed one.

        Raises:
          UnreachableError: no attempt is left; the message ends with `expected`.
          CancelledError: the caller gave up.
        """
        try:
            self._left = self._left.increment()
        except MaxRetryError:
            raise UnreachableError(f"{error}, expected {expected}") from None
        log.debug(f"{error}; asks again, {self._left.total + 1} attempts are left")
        pause(self._seconds(error), self._cancelled)
        self.check()

    def _seconds(self, error: TransientError) -> float:
        if error.retry_after is not None:
            try:
                return self._left.parse_retry_after(error.retry_after)
            except (HTTPError, ValueError, OverflowError):  # neither seconds nor a date
                pass
        return self._left.get_backoff_time()


def pause(seconds: float, cancelled: Event) -> None:
    """Wait before another attempt, or until cancelled."""
    cancelled.wait(seconds)


def call(request: Callable[[], Answer], network: NetSettings) -> Answer:
    """Return what `request` returns; attempt it again while it raises TransientError.

    Raises:
      UnreachableError: no attempt is left; or an error of `request`.
    """
    attempts = Attempts(network)
    while True:
        try:
            return request()
        except TransientError as error:
            attempts.failed(error, f"an answer within {network.attempts} attempts; run again")
