"""Requests to stop: SIGTERM, as engines and clusters send it, and Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Only record SIGTERM and Ctrl-C inside the block, so that a trainer can save before it ends.

    Yields:
      A function that tells whether to stop.
    """
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in signals}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
