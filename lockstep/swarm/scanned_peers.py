"""Several rounds as one program: layout "rounds", for steps by rules, whose bits no layout changes.

A block of rounds is computed as planned: nobody fails, and every message is applied. Messages never
leave the program; it returns what a round needs to know of them.
"""

from collections.abc import Mapping, Sequence
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
from lockstep.protocol.round import Round
from lockstep.same_bits.evaluation import same_bits
from lockstep.swarm.peers import RoundSteps, SimulatedPeers
from lockstep.wire.facts import MessageFacts, facts_of


class PlannedRound(NamedTuple):
    """A round in which all peers train, and everything that they send is applied."""

    round: Round
    work: Mapping[int, Work]
    weights: Mapping[int, int]  # of its messages, by peer


@dataclass
class Block:
    """Rounds that are computed as planned."""

    plan: Sequence[PlannedRound]
    after: tuple[Replica, list[Tree]]  # what all agree on then, and what each peer owns
    facts_KP: MessageFacts  # of the messages: [round, peer]

    @cached_property
    def facts(self) -> list[list[MessageFacts]]:
        """The facts of each peer's message in each round; waits until the block is computed."""
        rounds = zip(*jax.device_get(self.facts_KP), strict=True)
        return [[*map(MessageFacts, *row)] for row in rounds]


class ScannedPeers(SimulatedPeers):
    """Peers of one device, which take several rounds by one program."""

    _room = 0  # rounds for which the program is compiled

    def plan(self, rounds: Sequence[PlannedRound], before: Block | None) -> Block:
        """Compute rounds as planned, after those of another block, or from where the peers are.

        Waits for nothing, and leaves peers where they are.
        """
        self._room = max(self._room, len(rounds))
        replica, own = before.after if before else (self._first, self._own)
        padded = [*rounds, *[rounds[-1]] * (self._room - len(rounds))]  # these are not taken
        works = [[planned.work[peer] for peer in range(self.count)] for planned in padded]
        rows = [jax.tree.map(lambda *x: np.stack(x), *(w.rows_MB for w in row)) for row in works]
        (params, shared, own), facts_KP = self._scan(
            (replica.params, replica.shared, own),
            np.int32(rounds[0].round.step),
            np.int32(len(rounds)),
            jax.tree.map(lambda *x: np.stack(x), *rows),
            np.array([[w.count for w in row] for row in works], np.int32),
            self._of_peers([planned.weights for planned in padded]),
            self._of_peers([planned.round.sequences for planned in padded]),
        )
        after = Replica(self.programs, replica.group, params, shared), own
        return Block(rounds, after, facts_KP)

    def take(self, block: Block) -> None:
        """Be where peers are after a block, which began where they were."""
        replica, self._own = block.after
        self._replicas = {replica.group: replica}

    def messages_of(self, planned: PlannedRound) -> dict[int, Tree]:
        """Take a planned round's steps after all, a program for each, and return the messages."""
        steps = RoundSteps(planned.work, planned.round.step, pack=lambda message, _: message)
        return {peer: result.message for peer, result in self.step(steps).items()}

    def _choose(self, groups: list[DeviceGroup]) -> list[DeviceGroup]:
        return groups[:1]

    def _of_peers(self, by_peer: Sequence[Mapping[int, int]]) -> np.ndarray:
        """Return numbers of each peer in each planned round, int32 [round, peer]."""
        return np.array([[of[peer] for peer in range(self.count)] for of in by_peer], np.int32)

    @cached_property
    def _scan(self) -> jax.stages.Wrapped:
        """The scanned program of some rounds.

        (state, first, count, rows_KPMB, counts_KP, weights_KP, sequences_KP) -> state, facts

        A state is params, shared and what each peer owns; facts are those of messages, [round,
        peer]. Of K rounds the first `count` are taken, the first of which is round `first`.
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

                def step_of_a_peer(given: tuple) -> tuple[Tree, Tree, MessageFacts]:
                    own, rows_MB, count = given
                    result = programs.step_of_a_peer(params, own, shared, rows_MB, count, step)
                    facts = facts_of(result.message, result.loss, programs.form)
                    return result.own, result.message, facts

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
            facts_KP = MessageFacts(none, none.astype(jnp.int32), none)
            agreed_own, facts_KP = jax.lax.fori_loop(
                0, count, take, ((params, shared, own_P), facts_KP)
            )
            params, shared, own_P = agreed_own
            own = [jax.tree.map(lambda x, p=p: x[p], own_P) for p in range(len(own))]
            return (params, shared, own), facts_KP

        return jax.jit(scan)
