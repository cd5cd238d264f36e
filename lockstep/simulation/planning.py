"""A simulation that plans rounds ahead, so that its peers can compute several by one program.

Rounds of a block are then taken one by one, as any round is, from the facts that the program gave.
Where something goes otherwise, those that were taken are computed again, a program for each peer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.replica import RoundMerge
from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Round
from lockstep.simulation.counting import CountingSwarm
from lockstep.swarm.delivery import Packed
from lockstep.swarm.peers import StepResult
from lockstep.swarm.scanned_peers import Block, PlannedRound, ScannedPeers
from lockstep.swarm.swarm import RoundWork, mean_loss
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
        self._blocks: deque[Block] = deque()  # that are computed and not over
        self._taken = 0  # rounds of the first

    def _begin(self, progress: RunProgress) -> tuple[RunProgress, tuple[int, ...], Round | None]:
        progress, applicants, round_ = super()._begin(progress)
        if not self._blocks:  # nothing is planned, or something went otherwise
            self._ahead = self._planned(progress, round_)
        while len(self._blocks) < BLOCKS and (rounds := self._block()):
            before = self._blocks[-1] if self._blocks else None
            self._blocks.append(self.peers.plan(rounds, before))
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
        everybody = set(range(self.peers.count))
        longest = Sent(None, b"", counted=self.peers.programs.form.bytes_most)
        made = {peer: StepResult(longest, 0.0) for peer in everybody}
        if self.outbox.asked > Asked.FACTS or self.outbox.large or self.peers.absent:
            return
        while round_ and round_.step <= self.last and round_.assignment.keys() == everybody:
            if round_.joined or round_.travelling:
                return
            work = {p: self._read(p, span, round_) for p, span in round_.assignment.items()}
            planned = PlannedRound(round_, work, self.weights(round_))
            sent = RoundWork(work, made, None, ())
            evidence = self._exchange(sent, round_, progress.now).evidence
            progress, decision = driver.finish_round(progress, round_, evidence)
            if everybody != {*decision.applied}:
                return
            yield planned
            progress, round_ = driver.next_round(progress)

    def work(self, round_: Round, unready: tuple[int, ...]) -> RoundWork:
        """Take the steps of a round; those of a planned one are computed already."""
        planned = self._plan_of(round_)
        if planned and not (unready or self.peers.absent):
            facts = dict(enumerate(self._blocks[0].facts[self._taken]))
            unread = Packed(lambda: Sent(None, b""))  # it never left its program
            results = {p: StepResult(unread, float(facts[p].loss)) for p in planned.work}
            done, bad = self._sent(results, facts, round_.step)
            if not bad:
                loss = mean_loss({p: d.loss for p, d in done.items()}, planned.weights)
                return RoundWork(planned.work, done, loss, ())
        self._leave_plan()
        return super().work(round_, unready)

    def apply(self, messages: Mapping[int, Tree], round_: Round) -> None:
        """Have peers apply the messages of a round; in one of a block they have done it already."""
        if planned := self._plan_of(round_):
            block = self._blocks[0]
            if messages.keys() == planned.work.keys():
                self._taken += 1
                if self._taken == len(block.plan):
                    self._blocks.popleft()
                    self._taken = 0
                    self.peers.take(block)
                return
            self._leave_plan()
            made = self.peers.messages_of(planned)
            messages = {slot: made[slot] for slot in messages}
        super().apply(messages, round_)

    def _plan_of(self, round_: Round) -> PlannedRound | None:
        """Return what was planned for a round, if it is the next of those that are computed."""
        planned = self._blocks[0].plan[self._taken] if self._blocks else None
        return planned if planned and planned.round == round_ else None

    def _leave_plan(self) -> None:
        """Forget what is planned, and have peers take the rounds of it that are over one by one."""
        blocks, self._blocks = self._blocks, deque()
        taken, self._taken = self._taken, 0
        for planned in blocks[0].plan[:taken] if blocks else ():
            round_, messages = planned.round, self.peers.messages_of(planned)
            self.peers.receive(RoundMerge(messages, round_.sequences, round_.step, planned.weights))
