"""Which snapshots a run takes, and the windows between them."""

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """The rounds from one snapshot that is kept whole to the next: the unit of replay."""

    first: int  # its first round; the opening snapshot was taken just before it
    last: int  # its last round; the closing snapshot was taken just after it

    @property
    def opening(self) -> int:
        """The step after which the snapshot was taken that opens the window."""
        return self.first - 1

    @property
    def rounds(self) -> range:
        """The steps of the window's rounds."""
        return range(self.first, self.last + 1)


class Snapshots(NamedTuple):
    """The snapshots of a run."""

    start: int  # the step after which the run starts: 0, unless it extends an earlier run
    end: int  # its last step
    every: int  # `[witness] snapshot_every`
    keep_every: int = 1  # `[witness] keep_every`

    @property
    def steps(self) -> list[int]:
        """The steps after which the run takes a snapshot."""
        return [self.start, *self._between, self.end]

    @property
    def kept(self) -> list[int]:
        """The snapshots that are kept whole; of the others only hashes are kept."""
        return [self.start, *self._kept_between, self.end]

    @property
    def windows(self) -> list[Window]:
        """The run's windows, in order."""
        return [Window(opening + 1, closing) for opening, closing in pairwise(self.kept)]

    def takes(self, step: int) -> bool:
        """Return whether the run takes a snapshot after a step."""
        return step in (self.start, self.end) or step in self._between

    def keeps(self, step: int) -> bool:
        """Return whether the snapshot after a step is kept whole."""
        return step in (self.start, self.end) or step in self._kept_between

    def window_after(self, opening: int) -> Window | None:
        """Return the window that the snapshot after step `opening` opens; None if none does."""
        if not self.keeps(opening) or opening >= self.end:
            return None
        later = self._kept_between[bisect_right(self._kept_between, opening) :]
        return Window(opening + 1, later[0] if later else self.end)

    @property
    def window_count(self) -> int:
        """The number of windows in the run."""
        return len(self._kept_between) + 1

    def first_round_of_payloads(self, step: int) -> int:
        """Return the first round of the payload file that holds the messages of round `step`."""
        return max(self.start, (step - 1) // self.every * self.every) + 1

    @property
    def _between(self) -> range:
        return range((self.start // self.every + 1) * self.every, self.end, self.every)

    @property
    def _kept_between(self) -> range:
        return self._between[self.keep_every - 1 :: self.keep_every]
