"""Several rounds as one program: layout "rounds", for steps by rules, whose bits no layout changes.

A block of rounds is computed as planned: nobody fails, and every message is applied. Its rounds are
then taken one by one, as any round is, from the losses and facts that the program returned. Where
something goes otherwise, or somebody reads a state in the midst of a block, the rounds that were
taken are computed again from the block's first state, a program for each peer.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import RoundPeers, Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import DeviceGroup
from lockstep.programs.replica import Replica
from lockstep.programs.train_step import Programs
from lockstep.protocol.round import Round
from lockstep.same_bits.evaluation import same_bits
from lockstep.swarm.peers import M, RoundSteps, SimulatedPeers, StepResult
from lockstep.transcript.state import State
from lockstep.wire.facts import MessageFacts, UnreadMessage, facts_of


class PlannedRound(NamedTuple):
    """A round in which all peers train, and everything that they send is applied."""

    round: Round
    work: Mapping[int, Work]
    weights: Mapping[int, int]  # of its messages, by peer


@dataclass
class _PlannedBlock:
    """A block of rounds that is computed as planned, and how many of them were taken."""

    plan: Sequence[PlannedRound]
    before: tuple[Replica, list[Tree]]  # what all agree on, and what each peer owns
    after: tuple[Replica, list[Tree]]
    facts: tuple[jax.Array, jax.Array, jax.Array]  # largest, saved, losses: [round, peer]
    taken: int = 0
    stepped: bool = False  # whether the peers took their steps of the round that is next

    @property
    def begun(self) -> bool:
        """Whether a block's first state is no longer the peers'."""
        return self.stepped or self.taken > 0

    @cached_property
    def results(self) -> list[list[tuple[UnreadMessage, float]]]:
        """Each peer's message and loss in each planned round; waits until they are computed."""
        largest_KP, saved_KP, loss_KP = jax.device_get(self.facts)
        return [
            [
                (UnreadMessage(MessageFacts(a, b)), float(loss))
                for a, b, loss in zip(*row, strict=True)
            ]
            for row in zip(largest_KP, saved_KP, loss_KP, strict=True)
        ]


class ScannedPeers(SimulatedPeers):
    """Peers of one device, which take several rounds by one program."""

    def __init__(
        self,
        programs: Programs,
        state: State,
        devices: Sequence[jax.Device],
        absent: Iterable[int] = (),
    ):
        self._blocks: deque[_PlannedBlock] = deque()
        self._again: dict[UnreadMessage, Tree] = {}  # messages of a round that were made again
        self._room = 0  # rounds for which the program is compiled
        super().__init__(programs, state, devices, absent)

    @property
    def blocks(self) -> int:
        """How many blocks are planned and not over."""
        return len(self._blocks)

    def plan(self, rounds: Sequence[PlannedRound]) -> None:
        """Compute these planned rounds, as far as nobody fails, after those planned already.

        Waits for nothing.
        """
        self._room = max(self._room, len(rounds))
        before = self._blocks[-1].after if self._blocks else (self._first, [*self._own])
        replica, own = before
        works = [[planned.work[peer] for peer in range(self.count)] for planned in rounds]
        works += [works[-1]] * (self._room - len(rounds))  # of one shape; no step is taken on them
        rows = [jax.tree.map(lambda *x: np.stack(x), *(w.rows_MB for w in row)) for row in works]
        (params, shared, own), facts = self._scan(
            (replica.params, replica.shared, own),
            np.int32(rounds[0].round.step),
            np.int32(len(rounds)),
            jax.tree.map(lambda *x: np.stack(x), *rows),
            np.array([[w.count for w in row] for row in works], np.int32),
            self._of_peers([planned.weights for planned in rounds]),
            self._of_peers([planned.round.sequences for planned in rounds]),
        )
        after = Replica(self.programs, replica.group, params, shared), own
        self._blocks.append(_PlannedBlock(rounds, before, after, facts))

    def step(self, steps: RoundSteps[M]) -> dict[int, StepResult[M]]:
        if not (self._blocks and self._is_planned(block := self._blocks[0], steps)):
            self._leave_plan()
            return super().step(steps)
        block.stepped = True
        results = {peer: block.results[block.taken][peer] for peer in steps.work}  # in this order
        return {p: StepResult(steps.pack(m, p), loss) for p, (m, loss) in results.items()}

    def receive(
        self,
        messages: Mapping[int, Tree],
        sequences: Mapping[int, int],
        step: int,
        weights: Mapping[int, int] | None = None,
    ) -> None:
        if self._blocks and _is_applied(block := self._blocks[0], messages, sequences, weights):
            block.taken, block.stepped = block.taken + 1, False
            if block.taken == len(block.plan):
                self._blocks.popleft()
                replica, self._own_at = block.after[0], [*block.after[1]]
                self._replicas_at = {replica.group: replica}
            return
        self._leave_plan()
        again, self._again = self._again, {}
        made = {s: again[m] if isinstance(m, UnreadMessage) else m for s, m in messages.items()}
        super().receive(made, sequences, step, weights)

    # Whoever reads a state in the midst of a block leaves the plan

    @property
    def _own(self) -> list[Tree | None]:
        if self._blocks and self._blocks[0].begun:
            self._leave_plan()
        return self._own_at

    @_own.setter
    def _own(self, own: list[Tree | None]) -> None:
        self._own_at = own

    @property
    def _replicas(self) -> dict[DeviceGroup, Replica]:
        if self._blocks and self._blocks[0].begun:
            self._leave_plan()
        return self._replicas_at

    @_replicas.setter
    def _replicas(self, replicas: dict[DeviceGroup, Replica]) -> None:
        self._replicas_at = replicas

    def _leave_plan(self) -> None:
        """Compute the rounds of a block that were taken again, and forget what is planned."""
        blocks, self._blocks = self._blocks, deque()
        if not (blocks and blocks[0].begun):
            return
        block = blocks[0]
        for planned in block.plan[: block.taken]:
            round_ = planned.round
            messages = self._messages_of(planned)
            super().receive(messages, round_.sequences, round_.step, planned.weights)
        if block.stepped:
            made = self._messages_of(block.plan[block.taken])
            self._again = {m: made[p] for p, (m, _) in enumerate(block.results[block.taken])}

    def _is_planned(self, block: _PlannedBlock, steps: RoundSteps) -> bool:
        """Return whether these are the steps of a block's next round, from the state before it."""
        (replica, own), planned = block.before, block.plan[block.taken]
        return (
            replica is self._replicas_at[replica.group]
            and all(a is b for a, b in zip(own, self._own_at, strict=True))
            and steps.number == planned.round.step
            and not (block.stepped or steps.broken or steps.hashed)
            and steps.work.keys() == planned.work.keys()
            and all(steps.work[peer] is work for peer, work in planned.work.items())
        )

    def _messages_of(self, planned: PlannedRound) -> dict[int, Tree]:
        """Take a planned round's steps, a program for each, and return the messages."""
        steps = RoundSteps(planned.work, planned.round.step, pack=lambda message, _: message)
        return {peer: result.message for peer, result in super().step(steps).items()}

    def _choose(self, groups: list[DeviceGroup]) -> list[DeviceGroup]:
        return groups[:1]

    def _of_peers(self, by_peer: Sequence[Mapping[int, int]]) -> np.ndarray:
        """Return numbers of each peer in each planned round, int32 [round, peer]."""
        numbers = np.zeros((self._room, self.count), np.int32)
        for row, of in zip(numbers, by_peer, strict=False):
            row[:] = [of[peer] for peer in range(self.count)]
        return numbers

    @cached_property
    def _scan(self) -> jax.stages.Wrapped:
        """The scanned program of some rounds.

        (state, first, count, rows_KPMB, counts_KP, weights_KP, sequences_KP) -> state, facts

        A state is params, shared and what each peer owns; facts are the largest magnitudes, the
        bytes saved and the losses, [round, peer]. Of K rounds the first `count` are taken, the
        first of which is round `first`.
        """
        programs = self.programs
        merge = same_bits(programs.update_of_all)

        def scan(
            state: tuple,
            first: jax.Array,
            count: jax.Array,
            rows_KPMB: Tree,
            counts_KP: jax.Array,
            weights_KP: jax.Array,
            sequences_KP: jax.Array,
        ) -> tuple[tuple, tuple]:
            def take(k: jax.Array, carry: tuple[tuple, tuple]) -> tuple[tuple, tuple]:
                (params, shared, own_P), facts_KP = carry
                step = first + k

                def step_of_a_peer(given: tuple) -> tuple[Tree, Tree, tuple]:
                    own, rows_MB, count = given
                    result = programs.step_of_a_peer(params, own, shared, rows_MB, count, step)
                    facts = facts_of(result.message, programs.form)
                    return result.own, result.message, (*facts, result.loss)

                rows_PMB = jax.tree.map(lambda x: x[k], rows_KPMB)
                given = own_P, rows_PMB, counts_KP[k]
                own_P, messages, facts_P = jax.lax.map(step_of_a_peer, given)
                weight, steps = weights_KP[k], programs.lots.steps_for(sequences_KP[k])
                peers = RoundPeers(weight, jnp.zeros_like(weight), steps)
                params, shared = merge(messages, peers, params, shared, step)
                facts_KP = jax.tree.map(lambda x_K, x: x_K.at[k].set(x), facts_KP, facts_P)
                return (params, shared, own_P), facts_KP

            params, shared, own = state
            own_P = jax.tree.map(lambda *rows: jnp.stack(rows), *own)
            none = jnp.zeros(counts_KP.shape)
            facts_KP = none, none.astype(jnp.int32), none
            agreed_own, facts_KP = jax.lax.fori_loop(
                0, count, take, ((params, shared, own_P), facts_KP)
            )
            params, shared, own_P = agreed_own
            own = [jax.tree.map(lambda x, p=p: x[p], own_P) for p in range(len(own))]
            return (params, shared, own), facts_KP

        return jax.jit(scan)


def _is_applied(
    block: _PlannedBlock,
    messages: Mapping[int, Tree],
    sequences: Mapping[int, int],
    weights: Mapping[int, int] | None,
) -> bool:
    """Return whether a block's next round has applied just these messages."""
    planned, results = block.plan[block.taken], block.results[block.taken]
    sent = {peer: message for peer, (message, _) in enumerate(results)}
    return (messages, sequences, weights) == (sent, planned.round.sequences, planned.weights)
