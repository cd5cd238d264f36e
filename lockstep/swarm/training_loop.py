"""The loop around a run's rounds, and the record from which a killed training goes on.

Stage train, `simulate`, benchmarks and tests train by it. They differ in who hears of the rounds:
see `Observer`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from lockstep.errors import LockstepError
from lockstep.protocol import driver, links
from lockstep.protocol.consensus import in_time
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.swarm.checkpoints import Checkpoints, Saved
from lockstep.swarm.swarm import FinishedRound, NotFiniteError, Swarm
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.recomputed import follow
from lockstep.transcript.state import State
from lockstep.transcript.transcript import RoundsFile
from lockstep.wire.exchange import Asked
from lockstep.wire.message import Form

MOST_EMPTY = 5  # rounds in a row in which nothing is in time, before a training stops


class Start(NamedTuple):
    """Where a training loop starts: the state, and how many rounds and sequences are behind it."""

    state: State
    step: int
    data_index: int

    def progress(self, settings: RoundSettings) -> driver.RunProgress:
        """Return the run before the loop's first round, without members yet."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((self.state.params, self.state.shared)))
        peers = range(settings.peers)
        loads = [links.load_seconds(settings.links, peer, size=size) for peer in peers]
        return driver.start(settings, self.step, self.data_index, loads)


class StartingPoint(NamedTuple):
    """Where a training loop begins or resumes."""

    step: int  # rounds behind it
    state: State  # after them
    progress: RunProgress  # the run after them
    entries: list[Entry]  # their record, if it goes on
    extras: dict[str, Any] | None  # what its checkpoint holds besides; None at the beginning

    @property
    def absent(self) -> tuple[int, ...]:
        """The peers whose process was gone at the loop's checkpoint; 0.1 had no record of them."""
        return tuple((self.extras or {}).get("absent", ()))

    @property
    def travelling(self) -> list:
        """Late messages that waited at the loop's checkpoint; absent in one without any."""
        return (self.extras or {}).get("travelling", [])


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

    def asked(self, form: Form) -> Asked:
        """Return what the record reads of messages of this form."""
        return self.rounds.asked(form) if self.rounds else Asked.FACTS

    def begin(
        self, start: Start, settings: RoundSettings, saved: Saved | None = None
    ) -> StartingPoint:
        """Return where a training resumes: its newest checkpoint, or its beginning.

        Rounds after the checkpoint are forgotten; the others are followed to where the run is.
        """
        progress, entries = start.progress(settings), []
        step, state, extras = saved or (start.step, start.state, None)
        if self.rounds:
            entries = self.rounds.cut(step)
            progress = follow(progress, entries, self.rounds)
        return StartingPoint(step, state, progress, entries, extras)

    def forget(self, step: int) -> None:
        """Forget a round, and all after it, in the record of a training."""
        if self.rounds:
            self.rounds.cut(step - 1)

    def state_is_due(self, step: int) -> bool:
        """Return whether a snapshot or a checkpoint is due after a step."""
        return self._snapshot_is_due(step) or self._checkpoint_is_due(step)

    def keep(
        self,
        finished: FinishedRound,
        state: Callable[[], State],
        extras: Callable[[], dict[str, Any]],
        *,
        save: bool,
    ) -> None:
        """Record a round, and take the snapshot and the checkpoint that are due after it.

        `state` returns a copy of the whole state after it, `extras` what else a checkpoint holds;
        with `save` a checkpoint is saved even if it is not due.

        Raises:
          NotFiniteError: The state is due, and not finite.
        """
        step = finished.entry.round.step
        if self.rounds:
            with self.timed("transcript"):
                self.rounds.round(finished.entry, finished.payloads, finished.others)
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
                self.rounds.snapshot(step, state_after, finished.own)
        if checkpoint:
            with self.timed("checkpoint"):
                extras_after = extras()
                self.rounds.flush()  # a checkpoint that outlives a power cut finds its rounds
                self.checkpoints.save(step, state_after, extras_after)

    def _snapshot_is_due(self, step: int) -> bool:
        return self.rounds is not None and self.rounds.takes(step)

    def _checkpoint_is_due(self, step: int) -> bool:
        return self.checkpoints is not None and step % self.every == 0


class Watch(Observer):
    """Ends a training, which errors call `name`, of which nothing is in time or accepted any more.

    A round in which too few witnesses attest to what is there does not count: other witnesses are
    elected for the next one, and a few that attest to nothing would end the run. `limit` is
    max_round_train_time, seconds.
    """

    def __init__(self, limit: float, name: str = "train"):
        self.limit, self.name, self.empty = limit, name, 0

    def took(self, entry: Entry) -> Entry:
        """Count a round of the training that is watched."""
        evidence = entry.evidence
        valid = set(in_time(evidence.arrivals, self.limit)).difference(evidence.broken)
        self.empty = 0 if valid or entry.decision.applied else self.empty + 1
        if self.empty < MOST_EMPTY:
            return entry
        arrived = evidence.arrivals.values()
        when = f"the first arrived after {min(arrived):,.1f} seconds" if arrived else "none arrived"
        raise LockstepError(
            f"{self.name}: no message was applied in {MOST_EMPTY} rounds in a row, up to round "
            f"{entry.round.step}: {when}, expected some within max_round_train_time = {self.limit}"
        )


class TrainingLoop:
    """The loop of a training in progress, up to its last round."""

    def __init__(
        self,
        swarm: Swarm,
        start: StartingPoint,
        record: Record,
        last: int,
        observers: Sequence[Observer] = (),
    ):
        self.swarm, self.record, self.last = swarm, record, last
        self.step, self.progress = start.step, start.progress
        self.observers = observers
        if start.extras:
            swarm.faults.restore(start.extras["faults"])
        if start.travelling:
            swarm.travelling.restore(start.travelling, swarm.peers.programs.form)
        if start.extras and "free" in start.extras:
            swarm.delivery.free.update({peer: (a, b) for peer, a, b in start.extras["free"]})

    def take_rounds(self) -> None:
        """Take the rounds that are left in the training loop.

        Raises:
          NotFiniteError: The training diverged.
          LockstepError: Too few peers are left, or nothing is applied any more.
        """
        while self.step < self.last and self._take_round():
            pass

    def _take_round(self) -> bool:
        """Take the loop's next round; return whether there was one."""
        for observer in self.observers:
            observer.begins(self.step + 1, self.progress)
        self.progress, finished = self.swarm.take_round(self.progress)
        if finished is None:
            return False
        entry = finished.entry
        if entry.round.step <= self.step:  # the round had another outcome after all
            self.record.forget(entry.round.step)
        self.step = entry.round.step
        for observer in self.observers:
            entry = observer.took(entry)
        requests = [observer.must_save(entry) for observer in self.observers]
        last, pausing = self.step == self.last, self.progress.pausing
        save = last or pausing or bool(entry.checkpointed) or any(requests)
        finished, peers = finished._replace(entry=entry), self.swarm.peers
        self.record.keep(finished, peers.state, self._extras, save=save)
        for observer in self.observers:
            observer.kept(entry, self.progress)
        return True

    def _extras(self) -> dict:
        """Return what the loop's checkpoint holds in addition to the state.

        The transcript has the coordinator's state; these are facts about the peers.
        """
        peers, faults = self.swarm.peers, self.swarm.faults
        extras = {"faults": faults.to_json(), "absent": sorted(peers.absent)}
        if travelling := self.swarm.travelling.to_json(peers.programs.form):
            extras["travelling"] = travelling
        if free := self.swarm.delivery.free:
            extras["free"] = [[peer, *seconds] for peer, seconds in sorted(free.items())]
        for observer in self.observers:
            extras |= observer.saves()
        return extras
