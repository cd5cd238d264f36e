"""Patience with a bad network: what is tried again, after how long, and when one gives up."""

import random
import time
from typing import NamedTuple

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0


class Network(NamedTuple):
    """How the network is used; `[runtime]` of a run file says it.

    Attributes:
      connections: files, or ranges of files, fetched at once.
      attempts: failures in a row, without a byte in between, after which one gives up.
      stall_seconds: seconds without an answer, or without a byte, that count as a failure.
      cache_bytes: memory for what is read while training.
    """

    connections: int = 8
    attempts: int = 8
    stall_seconds: float = 30.0
    cache_bytes: int = 256 * 10**6


class Broken(Exception):
    """A failure that another attempt may mend: a connection cut or stalled, a server too busy.

    Args:
      said: in words, without credentials.
      wait_seconds: what the server asked to wait, or None.
    """

    def __init__(self, said: str, wait_seconds: float | None = None):
        super().__init__(said)
        self.wait_seconds = wait_seconds


class Patience:
    """Counts failures in a row, and waits after each: twice as long each time, and jittered.

    wait = 0.5 s * 2^(failures - 1), at most 30 s, times a random factor of 0.5 to 1, so that many
    who failed together do not come back together; or what the server asked for, at most 30 s.

    Args:
      attempts: failures in a row after which `failed` raises.
    """

    def __init__(self, attempts: int):
        self.attempts, self.failures = attempts, 0

    def progressed(self) -> None:
        """Something came: failures are counted anew."""
        self.failures = 0

    def failed(self, error: Broken) -> None:
        """Waits until the next attempt.

        Raises:
          Broken: `error`, where there is none.
        """
        self.failures += 1
        if self.failures >= self.attempts:
            raise error
        wait = min(FIRST_WAIT_SECONDS * 2 ** (self.failures - 1), LONGEST_WAIT_SECONDS)
        wait *= random.uniform(0.5, 1)
        if error.wait_seconds is not None:
            wait = min(max(wait, error.wait_seconds), LONGEST_WAIT_SECONDS)
        time.sleep(wait)
