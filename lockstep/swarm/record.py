"""What a killed training resumes from: its rounds so far, and checkpoints of its state."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.protocol.driver import RunProgress
from lockstep.swarm.checkpoints import Checkpoints, Saved
from lockstep.swarm.round_settings import RoundSettings
from lockstep.swarm.swarm import NotFiniteError, Taken
from lockstep.transcript.entry import Entry
from lockstep.transcript.follow import follow
from lockstep.transcript.rounds_file import RoundsFile
from lockstep.transcript.state import State
from pipeline.start.begin import Start


class Begun(NamedTuple):
    """Where a training begins or resumes.

    step: Rounds behind it. state: Its state after them. progress: The run after them. entries:
      Their record, if it goes on. rest: What its checkpoint holds besides; None at the beginning.
    """

    step: int
    state: State
    progress: RunProgress
    entries: list[Entry]
    rest: dict[str, Any] | None

    @property
    def absent(self) -> tuple[int, ...]:
        """The peers whose process was gone; release 0.1 did not record them."""
        return tuple((self.rest or {}).get("absent", ()))

    @property
    def travelling(self) -> list:
        """The late messages that were waiting; absent in a checkpoint without any."""
        return (self.rest or {}).get("travelling", [])


@dataclass
class Record:
    """The record of a training in progress; parts that are None are not kept.

    `rounds` is a file of rounds, or the writer of a transcript, which has payloads and snapshots
    besides. A checkpoint is due after `every` rounds.
    """

    rounds: RoundsFile | None = None
    checkpoints: Checkpoints | None = None
    every: int = 1
    timed: Callable[[str], AbstractContextManager[None]] = nullcontext

    def begin(self, start: Start, settings: RoundSettings, saved: Saved | None = None) -> Begun:
        """Return where a training resumes: its newest checkpoint, or its beginning.

        Rounds after the checkpoint are forgotten, and the others followed to where the run is.

        Raises:
          LockstepError: Rounds are missing, damaged or false.
        """
        progress, entries = start.progress(settings), []
        step, state, rest = saved or (start.step, start.state, None)
        if self.rounds:
            entries = self.rounds.cut(step)
            progress = follow(progress, entries, self.rounds, stores=settings.stores_epochs)
        return Begun(step, state, progress, entries, rest)

    def state_is_due(self, step: int) -> bool:
        """Return whether a snapshot or a checkpoint is due after a step."""
        return self._snapshot_is_due(step) or self._checkpoint_is_due(step)

    def keep(
        self,
        taken: Taken,
        state: Callable[[], State],
        rest: Callable[[], dict[str, Any]],
        *,
        save: bool,
    ) -> None:
        """Append a round, and take the snapshot and the checkpoint that are due after it.

        `state` returns a copy of the whole state after it, `rest` what a checkpoint holds besides;
        with `save` a checkpoint is saved though it is not due.

        Raises:
          NotFiniteError: The state is due, and not finite.
        """
        step = taken.entry.round.step
        if self.rounds:
            with self.timed("transcript"):
                self.rounds.round(*taken)
        snapshot = self._snapshot_is_due(step)
        checkpoint = self.checkpoints and (save or self._checkpoint_is_due(step))
        if not (snapshot or checkpoint):
            return
        with self.timed("fetch state"):
            state_after = state()
        # a loss shows neither a momentum's NaN nor the last round's
        if bad := state_after.not_finite():
            raise NotFiniteError(f"{bad[0]} is not finite after round {step}")
        if snapshot:
            with self.timed("snapshot"):
                self.rounds.snapshot(step, state_after)
        if checkpoint:
            with self.timed("checkpoint"):
                besides = rest()
                self.rounds.flush()  # a checkpoint that outlives a power cut finds its rounds
                self.checkpoints.save(step, state_after, besides)

    def _snapshot_is_due(self, step: int) -> bool:
        return self.rounds is not None and self.rounds.takes(step)

    def _checkpoint_is_due(self, step: int) -> bool:
        return self.checkpoints is not None and step % self.every == 0
