"""What a tracker of runs must do to show a training."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

Scalars = Mapping[str, float]
"""Numbers of a step, by names that all trackers share, such as `loss/train`."""


class TrackedRun(NamedTuple):
    """The training that a sink shows."""

    key: str  #: Key of its stage train, by which a tracker finds it again.
    name: str  #: What trackers call it: optimizer, size and key, as in distro-1.9M-18b4f5f188fd.
    project: str  #: The project, or experiment, that it belongs to.
    folder: Path  #: Where trackers that write files put them.
    settings: dict  #: Its run file, without what changes no result.
    step: int  #: Rounds that are behind it: those of the checkpoint that it resumes from.


class Sink(Protocol):
    """A tracker, told of one training from one thread; what it raises ends the telling, no more.

    A training that was killed and resumed is one run of the tracker. Its transcript has all rounds
    up to the checkpoint, so a sink says up to which step it has them, and is told the rest again.
    """

    def open(self, run: TrackedRun) -> int:
        """Begin, or go on, and return the last step that it has, -1 if it has none."""

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Take numbers of a step, `at` a time in seconds since 1970.

        A step may come twice, or late: the scores of a task are computed while training goes on.
        """

    def close(self, *, finished: bool) -> None:
        """End: the training has taken its last round, or else was stopped and may go on."""
