"""The loop over a run's rounds, from the first, or from where a killed training stopped.

Stage train, `simulate`, benchmarks and tests train by it. They differ in who hears of the rounds:
see `Observer`.
"""

from collections.abc import Sequence

from lockstep.swarm.record import Begun, Record
from lockstep.swarm.swarm import Swarm
from lockstep.transcript.observer import Observer
from pipeline.start import in_time


class TrainingLoop:
    """A training in progress, up to its last round; errors call it `name`."""

    def __init__(
        self,
        swarm: Swarm,
        begun: Begun,
        record: Record,
        last: int,
        observers: Sequence[Observer] = (),
        *,
        name: str = "train",
    ):
        self.swarm, self.record, self.last = swarm, record, last
        self.step, self.progress = begun.step, begun.progress
        limit = swarm.settings.coordinator.max_round_train_time
        self.observers = [in_time.Watch(limit, name), *observers]
        if begun.rest:
            swarm.faults.restore(begun.rest["faults"])
        if begun.travelling:
            swarm.travelling.restore(begun.travelling, swarm.peers.programs.form)

    def take_rounds(self) -> None:
        """Take the rounds that are left.

        Raises:
          NotFiniteError: The training diverged.
          LockstepError: Too few peers are left, or nothing is applied any more.
        """
        while self.step < self.last:
            self._take_round()

    def _take_round(self) -> None:
        for observer in self.observers:
            observer.begins(self.step + 1, self.progress)
        self.progress, taken = self.swarm.take_round(self.progress)
        entry = taken.entry
        self.step = entry.round.step
        for observer in self.observers:
            entry = observer.took(entry)
        asked_for = [observer.must_save(entry) for observer in self.observers]
        last, pausing = self.step == self.last, self.progress.pausing
        save = last or pausing or bool(entry.checkpointed) or any(asked_for)
        taken, peers = taken._replace(entry=entry), self.swarm.peers
        self.record.keep(taken, peers.state, self._rest, save=save)
        for observer in self.observers:
            observer.kept(entry, self.progress)

    def _rest(self) -> dict:
        """Return what a checkpoint holds besides the state.

        The transcript has the coordinator's state; these are facts about the peers.
        """
        peers, faults = self.swarm.peers, self.swarm.faults
        rest = {"faults": faults.to_json(), "absent": sorted(peers.absent)}
        if travelling := self.swarm.travelling.to_json(peers.programs.form):
            rest["travelling"] = travelling
        for observer in self.observers:
            rest |= observer.saves()
        return rest
