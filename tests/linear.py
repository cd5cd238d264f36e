"""Texts on which a slow pattern takes longest, and an end for what takes too long or never ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 20  # of a machine that is busy with other things
WORST = ("a://", "a://a@", "a://a?", "bearer : ", "signature=", "hf_secre", "\x1b]0;", "a: ", "\n")


class Late(BaseException):
    """Not for those who catch every error."""


@contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """End a block that takes longer than a linear one can; the matcher looks for signals."""

    def late(*_: object) -> None:
        raise Late(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
