"""Retries: which failures another attempt may fix, how long to wait first, and when to give up."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

from urllib3 import Retry
from urllib3.exceptions import HTTPError, MaxRetryError

from lockstep.errors import LockstepError
from pipeline.runfile import Network

log = logging.getLogger(__name__)

BACKOFF_SECONDS, JITTER_SECONDS = 0.5, 0.5
LONGEST_WAIT_SECONDS = 30.0
Answer = TypeVar("Answer")


@contextmanager
def told() -> Iterator[None]:
    """Log each attempt that fails in the block, for who waits in front of a terminal."""
    before = log.level
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(before)


class TransientError(Exception):
    """A failure that another attempt may fix: a connection cut or stalled, a busy server.

    The message is one line without credentials; `retry_after` is the server's Retry-After header.
    """

    def __init__(self, message: str, retry_after: str | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class NotFetchedError(LockstepError):
    """A server refused, or none answered: nothing is known of what was asked for."""


class UnreachableError(NotFetchedError):
    """No server answered, or the process is offline; nothing was found to be wrong."""


class UnnamedVersionError(LockstepError):
    """The rest of a file may be of another version: the server does not say of which it is."""


class CancelledError(Exception):
    """The caller no longer needs the result."""


class Attempts:
    """Counts failures in a row, and waits after each.

    urllib3's back-off: 0 s, then 0.5 s * 2**(failures - 1) plus up to 0.5 s of jitter, at most
    30 s; or what the server's Retry-After asks for, at most 30 s. `network.attempts` failures in a
    row are the last; `cancelled` ends a wait.
    """

    def __init__(self, network: Network, cancelled: Event | None = None):
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
        """Forget earlier failures: something arrived."""
        self._left = self._all

    def failed(self, error: TransientError, expected: str) -> None:
        """Wait until the next attempt.

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
    """Wait, or until cancelled."""
    cancelled.wait(seconds)


def call(request: Callable[[], Answer], network: Network) -> Answer:
    """Return what `request` returns, repeated while it is TransientError.

    Raises:
      UnreachableError: no attempt is left; or an error as of `request`.
    """
    attempts = Attempts(network)
    while True:
        try:
            return request()
        except TransientError as error:
            attempts.failed(error, f"an answer within {network.attempts} attempts; run again")
