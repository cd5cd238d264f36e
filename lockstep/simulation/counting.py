"""Peers of a simulation count by what counts in their losses, where that is not their examples."""

from collections.abc import Mapping

import numpy as np

from lockstep.errors import LockstepError
from lockstep.programs.local_training import HostSteps, Work
from lockstep.protocol.committee import Span
from lockstep.protocol.round import Round
from lockstep.swarm.peers import SimulatedPeers
from lockstep.swarm.swarm import Swarm

MOST_WEIGHT = 2**20  # of a weight, which is an integer, where counts are not


class CountingSwarm(Swarm):
    """A swarm whose means over the peers are those over all that counts in their losses.

    A count follows from the examples that a peer was assigned, and is not the peer's word: a liar
    counts as if it were honest.
    """

    peers: SimulatedPeers
    _counts: dict[tuple[int, int], float] = {}  # by peer and round
    _works: dict[tuple[int, Span], Work] = {}  # that were read in this round

    def weights(self, round_: Round) -> Mapping[int, int]:
        """Return what counts in each message's loss; the number of examples if all count alike."""
        if not self.peers.programs.task.sums:
            self._works = {}
            return round_.sequences
        before, keys = self._counts, {slot: round_.origin(slot) for slot in round_.spans}
        self._counts = {
            key: before[key] if key in before else self._count(slot, round_)
            for slot, key in keys.items()
        }
        self._works = {}
        return _integers({slot: self._counts[key] for slot, key in keys.items()})

    def _read(self, peer: int, span: Span, round_: Round) -> Work:
        if (peer, span) not in self._works:
            self._works = self._works | {(peer, span): super()._read(peer, span, round_)}
        return self._works[peer, span]

    def _count(self, slot: int, round_: Round) -> float:
        (peer, step), programs = round_.origin(slot), self.peers.programs
        work = self._read(peer, round_.spans[slot], round_)
        params, steps = self.peers.params_and_shared()[0], programs.steps
        lots = [(h, rows) for h, rows in enumerate(programs.lots.rows(work)) if rows is not None]
        if isinstance(steps, HostSteps):
            return sum(steps.by.count(params, x, steps.seed_of(step, h, x)) for h, x in lots)
        size = self.settings.micro_batch
        return sum(programs.task.count(params, x, size, step, h) for h, x in lots)


def _integers(counts: Mapping[int, float]) -> dict[int, int]:
    """Return counts of a round as weights: integers, and of others shares of the largest."""
    for count in counts.values():
        if not 0 <= count < np.inf:
            raise LockstepError(
                f"simulate: loss_fn returns (sum, count) with a count of {count}, expected from 0"
            )
    largest = max(counts.values(), default=0)
    whole = all(count == int(count) for count in counts.values()) and largest < 2**31
    scale = 1 if whole or not largest else MOST_WEIGHT / largest
    return {slot: round(count * scale) for slot, count in counts.items()}
