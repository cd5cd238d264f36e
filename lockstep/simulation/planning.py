"""A simulation that plans rounds ahead, so that its peers can compute several by one program."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lockstep.programs.local_training import Work
from lockstep.protocol import driver
from lockstep.protocol.committee import Span
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Round
from lockstep.simulation.counting import CountingSwarm
from lockstep.swarm.peers import StepResult
from lockstep.swarm.scanned_peers import PlannedRound, ScannedPeers
from lockstep.swarm.swarm import RoundWork
from lockstep.wire.exchange import Asked, Sent

BLOCKS = 2  # that are planned: while one is computed, the rounds of the one before it are recorded
MOST_ROUNDS, MOST_BYTES = 64, 2**27  # of a block; of its rows, about


class PlanningSwarm(CountingSwarm):
    """A swarm of `ScannedPeers`, for which it plans rounds up to `last`.

    A state is read where `is_read(step)`, so blocks of rounds end there.
    """

    peers: ScannedPeers

    def __init__(self, *arguments: Any, last: int, is_read: Callable[[int], bool], recorded: Asked):
        super().__init__(*arguments, recorded=recorded)
        self.last, self.is_read = last, is_read
        self._ahead: Iterator[PlannedRound] = iter(())
        self._plan: dict[int, PlannedRound] = {}  # by round

    def _begin(self, progress: RunProgress) -> tuple[RunProgress, tuple[int, ...], Round | None]:
        progress, applicants, round_ = super()._begin(progress)
        if not self.peers.blocks:  # nothing is planned, or something went otherwise
            self._ahead = self._planned(progress, round_)
        while self.peers.blocks < BLOCKS and (block := self._block()):
            over = [step for step in self._plan if step < round_.step]
            for step in over:
                del self._plan[step]
            self._plan |= {planned.round.step: planned for planned in block}
            self.peers.plan(block)
        return progress, applicants, round_

    def _block(self) -> list[PlannedRound]:
        """Return the next planned rounds, up to one after which a state is read."""
        block, size = [], 0
        for planned in self._ahead:
            block.append(planned)
            size += sum(
                x.nbytes for x in jax.tree.leaves([w.rows_MB for w in planned.work.values()])
            )
            if self.is_read(planned.round.step) or len(block) == MOST_ROUNDS or size > MOST_BYTES:
                break
        return block

    def _planned(self, progress: RunProgress, round_: Round | None) -> Iterator[PlannedRound]:
        """Yield a planned round and those after it, as they are if nobody fails.

        They are decided as all rounds are, on messages that are as long as any can be.
        """
        everybody, read = set(range(self.peers.count)), super()._read
        longest = Sent(None, b"", counted=self.peers.programs.form.bytes_most)
        made = {peer: StepResult(longest, 0.0) for peer in everybody}
        if self.outbox.asked > Asked.FACTS or self.outbox.large or self.peers.absent:
            return
        while round_ and round_.step <= self.last and round_.assignment.keys() == everybody:
            if round_.joined or round_.travelling:
                return
            work = {peer: read(peer, span, round_) for peer, span in round_.assignment.items()}
            planned = PlannedRound(round_, work, self.weights(round_))
            evidence = self._exchange(
                RoundWork(work, made, None, ()), round_, progress.now
            ).evidence
            progress, decision = driver.finish_round(progress, round_, evidence)
            if everybody != {*decision.applied}:
                return
            yield planned
            progress, round_ = driver.next_round(progress)

    def weights(self, round_: Round) -> Mapping[int, int]:
        """Return what counts in each message, see `CountingSwarm`; it was counted with the plan."""
        planned = self._plan.get(round_.step)
        return planned.weights if planned and planned.round == round_ else super().weights(round_)

    def _read(self, peer: int, span: Span, round_: Round) -> Work:
        planned = self._plan.get(round_.step)
        if planned and planned.round.assignment[peer] == span:
            return planned.work[peer]
        return super()._read(peer, span, round_)
