"""Who hears of a training's rounds."""

from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry


class Observer:
    """Hears of each round of a training. What a subclass leaves out does nothing.

    A training calls the observers in the order of their list. Only `took` may change what is
    recorded.
    """

    def begins(self, step: int, progress: RunProgress) -> None:
        """A round begins; `progress` is the run after the one before."""

    def took(self, entry: Entry) -> Entry:
        """Return a round that was taken, with what is to be recorded beside it."""
        return entry

    def must_save(self, entry: Entry) -> bool:
        """Return whether a checkpoint is to be saved after this round, due or not."""
        del entry
        return False

    def saves(self) -> dict:
        """Return what a checkpoint must hold of it, as JSON; called before one is saved."""
        return {}

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """A round is on record, and so is the checkpoint that was due."""
