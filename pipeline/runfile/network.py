"""How the network is used: settings of `[runtime]`, which no stage's key holds."""

from typing import NamedTuple


class Network(NamedTuple):
    """How the network is used.

    Attributes:
      connections: files, or ranges of files, fetched at once.
      attempts: failures in a row, without a byte in between, before giving up.
      stall_seconds: seconds without an answer, or without a byte, that count as a failure.
      cache_bytes: memory for token files read while training.
    """

    connections: int = 8
    attempts: int = 8
    stall_seconds: float = 30.0
    cache_bytes: int = 256 * 10**6
