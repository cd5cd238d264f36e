"""Replay: the very programs of training, on the same data, to the same hashes.

The unit is a window: one peer from one snapshot to the next. A replayed window must give every
message the peer committed to, and the hash of its state at the next snapshot. On the way, the
params are recomputed from the payloads, so that their chain of hashes is checked from snapshot to
snapshot whether a peer is replayed or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from pipeline import runfile
from pipeline.audit.verdict import Finding
from pipeline.optim.optimizer import Tree
from pipeline.programs.placement import DeviceGroup, device_groups
from pipeline.programs.replica import Replica
from pipeline.programs.train_step import Programs
from pipeline.protocol.dispute import Claim
from pipeline.stage import devices
from pipeline.swarm.peers import assigned
from pipeline.tokens.sequences import Sequences
from pipeline.transcript.entry import Entry, Header
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript
from pipeline.wire import exchange
from pipeline.wire import message as wire
from pipeline.wire.commitment import tree_hash

# Tolerance method: the largest distance (`Optimizer.compare`) of a sent message from the replayed
# one, by the precision of the gradients. docs/explanation/verification.md says what was measured.
TOLERANCE = {"float32": 0.05, "bfloat16": 0.5}
# ... and the largest share of params that may differ after a window: where the decoded update is
# within rounding of zero its sign is anyone's.
PARAMS_TOLERANCE = 0.02


def why_not_bitwise(run: runfile.Run, header: Header) -> str | None:
    """The reason why a replay here cannot be compared bit for bit, or None where it can."""
    if run.peers.layout != "each":
        return f"[peers] layout = {run.peers.layout} is another program than a lone peer's"
    if not header.bitwise:
        return "the training machine did not repeat a step bit for bit"
    here = devices.describe()
    for name, there in header.environment.items():
        if here.get(name) != there:
            return f"{name} is {here.get(name)!r} here, was {there!r} in training"
    return None


@dataclass(frozen=True)
class Replay:
    """What replaying needs.

    run, programs, data, form: as for training; transcript: what is checked; start: the state that
    training began with; bitwise: whether bits must be equal, or distances small.
    """

    run: runfile.Run
    programs: Programs
    transcript: Transcript
    data: Sequences
    form: wire.Form
    start: State
    bitwise: bool

    @property
    def dense(self) -> bool:
        """Whether messages are not kept, so that a window is replayed for all its peers or none."""
        return self.form.kind == wire.DENSE

    def window(
        self,
        window: runfile.Window,
        peers: Sequence[int],
        advance: Callable[[], None],
        group: DeviceGroup | None = None,
    ) -> list[Finding]:
        """Checks the chain of params over a window, and replays some of its peers.

        The transcript has passed its audit. Where messages are dense and `peers` is empty, nothing
        is done.

        Args:
          window: which.
          peers: whom to replay.
          advance: called after each round.
          group: the devices to compute on, by default the first.
        """
        if self.dense and not peers:
            return []
        return _WindowReplay(self, window, peers, group or self.groups[0]).findings(advance)

    @cached_property
    def groups(self) -> list[DeviceGroup]:
        """The device groups on which windows can be replayed, side by side."""
        return device_groups(jax.devices(), self.programs.parts)


class _WindowReplay:
    """One window on its way: the params, and what each replayed peer owns."""

    def __init__(
        self, replay: Replay, window: runfile.Window, peers: Sequence[int], group: DeviceGroup
    ):
        self.replay, self.window, self.peers = replay, window, peers
        transcript, start = replay.transcript, replay.start
        agreed = transcript.agreed(window.opening, start)
        self.replica = Replica.put(replay.programs, group, *agreed)
        self.own = {
            peer: group.put(transcript.own(window.opening, peer, start.own[peer])) for peer in peers
        }
        self.blamed: list[Finding] = []

    def findings(self, advance: Callable[[], None]) -> list[Finding]:
        """Takes the window's rounds again, and compares the state at their end."""
        for entry in self.replay.transcript.window(self.window):
            self._join(entry)
            replayed = self._step(entry)
            sent = self._applied(entry, replayed)
            if sent is None:  # what was applied in place of the replayed message is not kept
                return self.blamed
            self._receive(sent, entry.round.step)
            if entry.round.step in self.replay.transcript.snapshots:
                self._compare_states(entry.round.step)
            advance()
        return self.blamed

    def _join(self, entry: Entry) -> None:
        """Peers that join are given the params as they are here, and begin with a new state."""
        for peer in entry.round.joined:
            if peer in self.own:
                self.own[peer] = self.replica.new_own()
        if entry.joined_params is not None and self.replay.bitwise:
            found = tree_hash(jax.device_get(self.replica.params))
            if found != entry.joined_params:
                text = f"who joined was given params {entry.joined_params[:12]}, expected "
                finding = Finding(entry.round.step, None, "params", text + found[:12], True)
                self.blamed.append(finding)

    def _step(self, entry: Entry) -> dict[int, Tree]:
        """The replayed peers' messages; whoever sent another is blamed, and goes on from the true
        state where bits are compared, else from what it sent."""
        replay, round, results = self.replay, entry.round, {}
        for peer in self.own:
            if peer not in entry.evidence.messages:
                continue
            work = assigned(replay.data, round.assignment[peer], replay.run, round.trainers)
            sent = None if replay.bitwise or replay.dense else self._sent(entry, peer)
            if sent is None:
                result = self.replica.step(self.own[peer], work, round.step)
                results[peer], self.own[peer] = (result.message, None), result.own
            else:
                distance, self.own[peer] = self.replica.compare(
                    self.own[peer], work, round.step, sent
                )
                results[peer] = (sent, distance)
        results = jax.device_get(results)
        for peer, (message, distance) in results.items():
            self._judge(entry, peer, message, distance)
        return {peer: message for peer, (message, _) in results.items()}

    def _sent(self, entry: Entry, peer: int) -> Tree | None:
        """A peer's message; None where its bytes are none."""
        try:
            return self.replay.transcript.message(entry.evidence.messages[peer], self.replay.form)
        except wire.WireError:
            return None

    def _judge(self, entry: Entry, peer: int, message: Tree, distance: float | None) -> None:
        """Blames whoever said other than the replay gives: the peer, or who took its step again."""
        recorded, applied = entry.evidence.messages[peer], peer in entry.decision.applied
        if self.replay.bitwise:
            found = exchange.commit(message, peer, entry.round).hex()
            if found != recorded.commitment:
                text = f"sent {recorded.commitment[:12]}, its replay gives {found[:12]}"
                self._blame(entry, peer, "message", text, applied)
            if recorded.state is not None:
                claim = Claim(found, tree_hash(jax.device_get(self.own[peer])))
                if claim.state != recorded.state:
                    text = f"committed to state {recorded.state[:12]}, its replay gives "
                    self._blame(entry, peer, "state", text + claim.state[:12], applied)
                self._judge_checks(entry, peer, claim)
        elif distance is not None:
            limit = TOLERANCE[self.replay.run.peers.precision]
            if not distance <= limit:
                text = f"sent a message at distance {distance:.3g} from its replay's, "
                text += f"expected at most {limit}"
                self._blame(entry, peer, "message", text, applied)

    def _judge_checks(self, entry: Entry, peer: int, claim: Claim) -> None:
        """What others found who took the peer's step again: verifiers, then tie-breakers."""
        found = [
            (check.verifier, check.found) for check in entry.evidence.checks if check.peer == peer
        ]
        for ruling in entry.evidence.rulings:
            if ruling.peer == peer:
                found += ruling.found.items()
        for other, said in found:
            if said != claim:
                text = f"took the step of peer {peer} again and said {said.message[:12]}, "
                text += f"its replay gives {claim.message[:12]}"
                self._blame(entry, other, "check", text, False)

    def _blame(self, entry: Entry, peer: int, kind: str, text: str, applied: bool) -> None:
        """Keeps a peer's first finding of a window, and the first that got into the params."""
        said = [finding for finding in self.blamed if finding.peer == peer]
        if not said or (applied and not any(finding.applied for finding in said)):
            self.blamed.append(Finding(entry.round.step, peer, kind, text, applied))

    def _applied(self, entry: Entry, replayed: dict[int, Tree]) -> dict[int, Tree] | None:
        """The messages that everybody applied; None where one of them is not to be had."""
        applied = entry.decision.applied
        if not self.replay.dense:
            return {peer: self._sent(entry, peer) for peer in applied}
        if any(f.peer in applied and f.round == entry.round.step for f in self.blamed):
            return None
        return {peer: replayed[peer] for peer in applied}

    def _receive(self, messages: dict[int, Tree], step: int) -> None:
        replay = self.replay
        self.replica = self.replica.receive(
            messages, replay.form.like, replay.run.peers.count, step
        )

    def _compare_states(self, step: int) -> None:
        """The state against what was committed to at a snapshot."""
        replay = self.replay
        params, shared = jax.device_get((self.replica.params, self.replica.shared))
        if not replay.bitwise:
            if step != self.window.last:  # kept as hashes only
                return
            there, _ = replay.transcript.agreed(step, replay.start)
            share = _share_that_differs(params, there)
            if share > PARAMS_TOLERANCE:
                text = f"{share:.1%} of the params do not follow from the messages of the window, "
                text += f"expected at most {PARAMS_TOLERANCE:.0%}"
                self.blamed.append(Finding(step, None, "params", text, True))
            return
        recorded = replay.transcript.recorded(step)
        if (tree_hash(params), tree_hash(shared)) != (recorded["params"], recorded["shared"]):
            text = "the params do not follow from the messages of the window"
            self.blamed.append(Finding(step, None, "params", text, True))
        for peer, own in self.own.items():
            found, committed = tree_hash(jax.device_get(own)), recorded["own"][peer]
            if found != committed and peer not in {finding.peer for finding in self.blamed}:
                text = f"committed to state {committed[:12]}, its replay gives {found[:12]}"
                self.blamed.append(Finding(step, peer, "state", text, True))


def _share_that_differs(found: Tree, expected: Tree) -> float:
    """The share of elements further apart than rounding."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    far = [np.sum(~np.isclose(a, b, rtol=1e-4, atol=1e-6)) for a, b in pairs]
    return float(sum(far)) / sum(leaf.size for leaf in jax.tree.leaves(expected))
