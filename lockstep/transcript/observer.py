"""Observers: what happens beside the rounds of a training."""

from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry


class Observer:
    """An observer is called at each round of a training; methods left out do nothing.

    A training calls the observers in the order of their list. Only `took` may change what is
    recorded.
    """

    def begins(self, step: int, progress: RunProgress) -> None:
        """Observe that a round begins; `progress` is the run after the round before."""

    def took(self, entry: Entry) -> Entry:
        """Observe a finished round; return it with anything to record beside it."""
        return entry

    def must_save(self, entry: Entry) -> bool:
        """Return whether this observer wants a checkpoint after this round, due or not."""
        return False

    def saves(self) -> dict:
        """Return this observer's part of a checkpoint, as JSON; called before one is saved."""
        return {}

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Observe that a round is recorded, and the checkpoint that was due is saved."""
