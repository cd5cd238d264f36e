"""Requests to stop: SIGTERM, as engines and clusters send it, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN = "the same command goes on"
SHOW_CURSOR = "\x1b[?25h"  # which a bar in a terminal hides


def end_on_request() -> None:
    """Have this process end at once on SIGTERM and Ctrl-C, with one line, but not if ignored.

    Whatever a stage does may be killed. An exception instead would be lost in a callback of JAX,
    or take XLA's compiler down with it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of `nohup` and background jobs
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
    name = signal.Signals(number).name
    # not through sys.stderr, whose buffer may be in use
    then = _cleanings[-1][1] if _cleanings else AGAIN
    os.write(2, f"\n{cursor}error: {name} received; {then}\n".encode())
    for clean, _ in _cleanings:
        clean()
    os._exit(128 + number)


_cleanings: list[tuple[Callable[[], object], str]] = []


@contextmanager
def cleaning(clean: Callable[[], object], then: str = AGAIN) -> Iterator[None]:
    """Call `clean` at the end of the block, or of the process if that is asked to end inside it.

    Args:
      clean: Takes away what is of no use to anybody else; may be called twice.
      then: What the same command does after a request, for the line that says so.
    """
    _cleanings.append((clean, then))
    try:
        yield
    finally:
        clean()
        _cleanings.pop()


@contextmanager
def stopping() -> Iterator[Callable[[], int]]:
    """Only record SIGTERM and Ctrl-C inside the block, so that a trainer can save before it ends.

    A second one is obeyed at once.

    Yields:
      A function that returns the exit status to end with: 0 unless asked to stop.
    """
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        if received:
            _end(number, frame)
        received.append(number)

    before = {number: signal.signal(number, record) for number in SIGNALS}
    try:
        yield lambda: 128 + received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
