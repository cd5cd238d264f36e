"""Texts on which a slow pattern takes longest, and an end for what is not linear in their size."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 20  # of a machine that is busy with other things
WORST = ("a://", "a://a@", "a://a?", "bearer : ", "signature=", "hf_secre", "\x1b]0;", "a: ", "\n")


@contextmanager
def in_time() -> Iterator[None]:
    """End a block that takes longer than a linear one can; the matcher looks for signals."""

    def ended(*_):
        raise TimeoutError(f"over {SECONDS} s, expected time in proportion to the size")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
