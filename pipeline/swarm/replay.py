"""Replay: the very programs of training, on the same data, to the same hashes.

The unit is a window: one peer from one snapshot to the next. A replayed window must give every
message the peer committed to, and the hash of its state at the next snapshot. On the way, the
params are recomputed from the payloads, so that their chain of hashes is checked from snapshot to
snapshot whether a peer is replayed or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from pipeline import config
from pipeline.optim.optimizer import Tree
from pipeline.placement import places
from pipeline.swarm import exchange, wire
from pipeline.swarm.audit import Finding
from pipeline.swarm.commitment import tree_hash
from pipeline.swarm.entry import Message
from pipeline.swarm.peers import Work, assigned, stack
from pipeline.swarm.rounds import Round
from pipeline.swarm.state import State, hashes
from pipeline.swarm.transcript import Transcript
from pipeline.tokens import Sequences
from pipeline.train_step import Programs

# Tolerance method: the largest distance (`Optimizer.compare`) of a sent message from the replayed
# one, by the precision of the gradients. docs/verification.md says what was measured.
TOLERANCE = {"float32": 0.05, "bfloat16": 0.5}
# ... and the largest share of params that may differ after a window: where the decoded update is
# within rounding of zero its sign is anyone's.
PARAMS_TOLERANCE = 0.02


def repeats_bit_for_bit(programs: Programs, state: State, work: Work, step: int) -> bool:
    """Whether this machine gives a peer's step the same bits twice: a self-test at the start."""

    place = places(jax.devices(), programs.parts)[0]

    def once() -> str:  # `own` is donated, so each time a copy
        return tree_hash(
            programs.peer_step(
                *place.put((state.params, state.own[0], state.shared)),
                place.put_sequences(work.tokens_MBT),
                *place.put_whole((np.int32(work.count), np.int32(step + 1))),
            )
        )

    return once() == once()


class Window(NamedTuple):
    """Rounds `first` + 1 to `last`, between the snapshots after those steps."""

    first: int
    last: int


@dataclass(frozen=True)
class Replay:
    """What replaying needs.

    run, programs, data, form: as for training; transcript: what is checked; start: the state that
    training began with; bitwise: whether bits must be equal, or distances small.
    """

    run: config.Run
    programs: Programs
    transcript: Transcript
    data: Sequences
    form: wire.Form
    start: State
    bitwise: bool

    def window(
        self, window: Window, peers: Sequence[int], advance: Callable[[], None]
    ) -> list[Finding]:
        """Checks the chain of params over a window, and replays some of its peers.

        The transcript has passed its audit. Messages that are dense are not kept, so their window
        can only be replayed for all peers together; where `peers` is empty then, nothing is done.

        Args:
          window: which.
          peers: whom to replay.
          advance: called after each round.
        """
        if self.form.kind == wire.DENSE and not peers:
            return []
        state = self.transcript.state(window.first, self.start)
        params, shared = state.params, state.shared
        own = {peer: state.own[peer] for peer in peers}
        blamed: dict[int, Finding] = {}

        began = self.transcript.snapshots[0]
        for entry in self.transcript.rounds[window.first - began : window.last - began]:
            round, messages = entry.round, entry.messages
            sent = {} if self.form.kind == wire.DENSE else self._decode(messages)
            replayed = self._step(params, shared, own, round, sent)
            for peer, (message, state_after, distance) in replayed.items():
                own[peer] = state_after
                finding = self._judge(message, distance, peer, round, messages[peer])
                if finding and peer not in blamed:
                    blamed[peer] = finding
            if self.form.kind == wire.DENSE:
                if blamed:  # what was applied in place of the replayed message is not kept
                    return list(blamed.values())
                sent = {peer: message for peer, (message, _, _) in replayed.items()}
            applied = {peer: sent[peer] for peer in entry.decision.applied}
            params, shared = self._receive(applied, params, shared, round.step)
            advance()
        after = State(params, shared, tuple(own[peer] for peer in peers))
        return [*blamed.values(), *self._compare_states(after, peers, blamed, window.last)]

    def _decode(self, messages: dict[int, Message]) -> dict[int, Tree]:
        return {
            peer: wire.decode(self.transcript.payload(message), self.form)
            for peer, message in messages.items()
        }

    def _step(
        self, params: Tree, shared: Tree, own: dict[int, Tree], round: Round, sent: dict[int, Tree]
    ) -> dict[int, tuple[Tree, Tree, jax.Array | None]]:
        """Each replayed peer's message, state after it, and distance to what was sent."""
        programs, results = self.programs, {}
        there = places(jax.devices(), programs.parts)
        for number, peer in enumerate(peer for peer in own if peer in round.assignment):
            work, place = (
                assigned(self.data, round.assignment[peer], self.run),
                there[number % len(there)],
            )
            count, step = place.put_whole((np.int32(work.count), np.int32(round.step)))
            arguments = (
                *place.put((params, own[peer], shared)),
                place.put_sequences(work.tokens_MBT),
                count,
            )
            if self.bitwise or self.form.kind == wire.DENSE:
                result = programs.peer_step(*arguments, step)
                results[peer] = result.message, result.own, None
            else:
                distance, after = programs.compare(*arguments, step, sent[peer])
                results[peer] = sent[peer], after, distance
        return jax.device_get(results)

    def _judge(
        self, message: Tree, distance: float | None, peer: int, round: Round, recorded: Message
    ) -> Finding | None:
        """A finding where the replayed message is not what the peer committed to."""
        if self.bitwise:
            found = exchange.commit(message, peer, round).hex()
            if found != recorded.commitment:
                text = f"sent {recorded.commitment[:12]}, its replay gives {found[:12]}"
                return Finding(round.step, peer, "message", text)
        elif distance is not None:
            limit = TOLERANCE[self.run.peers.precision]
            if not distance <= limit:
                text = f"sent a message at distance {distance:.3g} from its replay's, "
                return Finding(round.step, peer, "message", text + f"expected at most {limit}")
        return None

    def _receive(
        self, messages: dict[int, Tree], params: Tree, shared: Tree, step: int
    ) -> tuple[Tree, Tree]:
        place = places(jax.devices(), self.programs.parts)[0]
        stacked, present_P = stack(messages, self.form.like, self.run.peers.count)
        present_P, step = place.put_whole((present_P, np.int32(step)))
        stacked, params, shared = place.put((stacked, params, shared))
        return jax.device_get(self.programs.receive(stacked, present_P, params, shared, step))

    def _compare_states(
        self, after: State, peers: Sequence[int], blamed: dict[int, Finding], step: int
    ) -> list[Finding]:
        """The state after a window against what was committed to at its closing snapshot."""
        findings = []
        if self.bitwise:
            found, recorded = hashes(after), self.transcript.recorded(step)
            if (found["params"], found["shared"]) != (recorded["params"], recorded["shared"]):
                text = "the params do not follow from the messages of the window"
                findings.append(Finding(step, None, "params", text))
            for peer, state_hash in zip(peers, found["own"], strict=True):
                if state_hash != recorded["own"][peer] and peer not in blamed:
                    text = f"committed to state {recorded['own'][peer][:12]}, its replay gives "
                    findings.append(Finding(step, peer, "state", text + state_hash[:12]))
            return findings
        recorded_state = self.transcript.state(step, self.start)
        share = _share_that_differs(after.params, recorded_state.params)
        if share > PARAMS_TOLERANCE:
            text = f"{share:.1%} of the params do not follow from the messages of the window, "
            text += f"expected at most {PARAMS_TOLERANCE:.0%}"
            findings.append(Finding(step, None, "params", text))
        return findings


def _share_that_differs(found: Tree, expected: Tree) -> float:
    """The share of elements further apart than rounding."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    far = [np.sum(~np.isclose(a, b, rtol=1e-4, atol=1e-6)) for a, b in pairs]
    return float(sum(far)) / sum(leaf.size for leaf in jax.tree.leaves(expected))
