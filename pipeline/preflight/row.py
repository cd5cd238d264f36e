"""The table that `lockstep check` prints: its rows, and what adds some.

A part adds its own by a file preflight.py, which has `LOOKS` and `NEEDS`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from lockstep.errors import LockstepError
from pipeline.net.limits import UnreachableError
from pipeline.runfile import Run


class Mark(Enum):
    """What a row means: its tick in the table, and in a table without ticks."""

    FINE = "✓", "ok"
    WARNING = "!", "warning"
    FAILS = "✗", "FAILS"
    UNKNOWN = "?", "unknown"


class CheckRow(NamedTuple):
    """What was checked, in a word, and the result; if a stage would fail, the remedy."""

    mark: Mark
    name: str
    text: str

    def line(self) -> str:
        """Return the row as a line of `check`'s table that this process's output can show."""
        plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        width = max(len(mark.value[plain]) for mark in Mark)
        return f"{self.mark.value[plain]:<{width}} {self.name:<13}{self.text}"


class Inspection(NamedTuple):
    """A look that `lockstep check` takes at a run."""

    name: str  #: What is looked at, in a word.
    stage: str | None  #: The stage before which it is looked at; None looks at it always.
    #: Yields the rows. A part's takes the run and the folder of its shards, None until it has any.
    take: Callable[..., Iterable[CheckRow]]


class Need(NamedTuple):
    """Packages that a key of the run file may need, beyond those that are always installed."""

    stage: str  #: The first stage that fails without them.
    key: str  #: The key, as errors call it.
    modules: Callable[[Run], Iterable[str]]  #: Returns the modules that the key's value needs.


def looked(name: str, look: Callable[[], Iterable[CheckRow]]) -> Iterator[CheckRow]:
    """Yield the rows of a look; one that fails or cannot be taken yields a row that says so.

    A server that cannot be reached now says nothing against the run.
    """
    try:
        yield from look()
    except UnreachableError as error:
        yield CheckRow(Mark.UNKNOWN, name, f"not looked at: {error}")
    except LockstepError as error:
        yield CheckRow(Mark.FAILS, name, str(error))
