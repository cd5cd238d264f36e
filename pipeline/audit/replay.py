"""Replay: the very programs of training, on the same data, to the same hashes.

The unit is a window: one peer from one snapshot to the next. A replayed window must give every
message that the peer committed to, and the hash of its state at the next snapshot. On the way the
params are recomputed from the payloads, so that their chain of hashes is checked from snapshot to
snapshot whether a peer is replayed or not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup, device_groups
from lockstep.programs.replica import Replica
from lockstep.protocol.attestation import Claim
from lockstep.protocol.round import Message
from lockstep.transcript.entry import Entry
from lockstep.transcript.params import FollowedParams
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import tree_hash
from lockstep.transcript.windows import Window
from lockstep.wire import exchange
from pipeline.audit.comparable import why_not_comparable
from pipeline.audit.verdict import Finding
from pipeline.start.set_up import Setup

NO_REPEAT = (
    "had other bits when replayed twice here: comparable on a machine that repeats its steps"
)


class WindowOutcome(NamedTuple):
    """The outcome of a window: findings, peers whose steps were compared, why others' were not."""

    findings: list[Finding]
    peers: tuple[int, ...]
    why: str | None = None


@dataclass(frozen=True)
class Replay:
    """The programs, data and settings with which an auditor replays windows."""

    setup: Setup
    transcript: Transcript  # it has passed the audit

    @property
    def kept(self) -> bool:
        """Whether messages to replay are kept; else a window is replayed for all peers or none."""
        return self.setup.programs.form.kept

    @cached_property
    def merges_exactly(self) -> bool:
        """Whether params follow from kept messages to the bit here, as by rules anywhere."""
        return not self.setup.programs.unruled or self._why(()) is None

    @cached_property
    def groups(self) -> list[DeviceGroup]:
        """The device groups on which windows can be replayed, side by side."""
        return device_groups(jax.devices(), self.setup.programs.parts)

    def window(
        self,
        window: Window,
        peers: Sequence[int],
        advance: Callable[[], None],
        group: DeviceGroup | None = None,
    ) -> WindowOutcome:
        """Check the chain of params over a window, and replay those of its peers that can be.

        If messages are not kept and `peers` is empty, nothing is done. What is found must be found
        twice: nobody is accused by steps that do not repeat on the auditor's machine.
        """
        together = [(peer,) for peer in peers] if self.kept else [tuple(peers)] * bool(peers)
        reasons = {some: self._why(self._sent(window, some)) for some in together}
        replayed = tuple(p for some, why in reasons.items() if why is None for p in some)
        why = next(filter(None, reasons.values()), None)
        if not replayed and not (self.kept and self.merges_exactly):
            return WindowOutcome([], (), why)
        group = group or self.groups[0]

        def once(advance: Callable[[], None]) -> list[Finding]:
            return WindowReplay(self, window, replayed, group).findings(advance)

        findings = once(advance)
        if findings and replayed:
            self.setup.programs.steps.by.close()  # a user's own code starts anew
            if (again := once(lambda: None)) != findings:
                # no step is needed to follow the params from messages that are kept
                of_params = [f for f in findings if self.kept and f.peer is None and f in again]
                why = f"rounds {window.first}-{window.last} {NO_REPEAT}"
                return WindowOutcome(of_params, (), why)
        return WindowOutcome(findings, replayed, why)

    def _why(self, sent: Iterable[Message]) -> str | None:
        return why_not_comparable(self.setup, self.transcript.header, sent)

    def _sent(self, window: Window, peers: Sequence[int]) -> Iterator[Message]:
        for entry in self.transcript.window(window):
            messages = entry.evidence.messages
            yield from (messages[peer] for peer in peers if peer in messages)


class WindowReplay:
    """A window's replay in progress: what its peers did is compared with what they should have.

    `params` are what all agree on, and `own` is what each of the replayed peers owns.
    """

    def __init__(self, replay: Replay, window: Window, peers: Sequence[int], group: DeviceGroup):
        setup, transcript, like = replay.setup, replay.transcript, replay.setup.start.state
        self.replay, self.window = replay, window
        replica = Replica.put(setup.programs, group, *transcript.agreed(window.opening, like))
        found = self.found = list[Finding]()

        def differs(step: int, text: str) -> None:  # no method, or arrays outlive their window
            found.append(Finding(step, None, "params", text, True))

        self.params = FollowedParams(transcript, setup.run.peers.count, replica, differs)
        before = {peer: transcript.own_before(window, peer, like.own[peer]) for peer in peers}
        self.own = {peer: group.put(own) for peer, own in before.items()}
        self.strayed = set[int]()  # peers that last committed to another state than replayed
        self._merged = {
            entry.round.origin(slot)
            for entry in transcript.window(window)
            for slot in entry.decision.applied
        }

    def findings(self, advance: Callable[[], None]) -> list[Finding]:
        """Recompute the window's rounds, and compare the state at every snapshot."""
        for entry in self.replay.transcript.window(self.window):
            if not self.take(entry):
                break
            if entry.round.step in self.replay.transcript.snapshots:
                self._compare_states(entry.round.step)
            advance()
        return self.found

    def take(self, entry: Entry) -> bool:
        """Replay the next round; return whether the replay can go on.

        Not if a message that is not kept was applied in the place of a replayed one.
        """
        self._begin(entry)
        self.strayed.difference_update(entry.round.joined, entry.evidence.silent)
        recomputed, can_go_on = self._step(entry)
        if can_go_on:
            self.params.follow(entry, None if self.replay.kept else recomputed)
        return can_go_on

    def _begin(self, entry: Entry) -> None:
        """Begin a replayed round: some peers take over the params, idle ones the last commit.

        A peer that joins or was silent has a new state.
        """
        self.params.begin(entry)
        plan, silent, replica = entry.round, entry.evidence.silent, self.params.replica
        for peer in (*plan.joined, *silent):
            if peer in self.own:
                self.own[peer] = replica.new_own()
        for peer in plan.idle.difference(silent).intersection(self.own):
            self.own[peer] = replica.align(self.own[peer], plan.step)

    # ---- Messages ----

    def _step(self, entry: Entry) -> tuple[dict[int, Tree], bool]:
        """Recompute the messages of the replayed peers, and blame peers that sent another.

        Also return whether the replay can go on. A false message that nobody merges, in this round
        or later, does not end it.
        """
        senders = [peer for peer in self.own if peer in entry.evidence.messages]
        recomputed = jax.device_get({peer: self._message(entry, peer) for peer in senders})
        false = {p for p, message in recomputed.items() if self._is_false(entry, p, message)}
        lost = not self.replay.kept and any(self._is_merged(entry, peer) for peer in false)
        return recomputed, not lost

    def _message(self, entry: Entry, peer: int) -> Tree:
        """Take a replayed peer's step, and return its message."""
        plan = entry.round
        work = self.replay.setup.work(plan.assignment[peer], plan.trainers)
        result = self.params.replica.step(self.own[peer], work, plan.step)
        self.own[peer] = result.own
        return result.message

    def _is_false(self, entry: Entry, peer: int, message: Tree) -> bool:
        """Blame the peer, its verifier or a ruling peer whose claim differs from the replay.

        Return whether the peer sent another message.
        """
        sent, applied = entry.evidence.messages[peer], self._is_merged(entry, peer)
        step, commitment = entry.round.step, exchange.commit(message, peer, entry.round).hex()
        if commitment != sent.commitment:
            text = f"sent {sent.commitment[:12]}, its replay gives {commitment[:12]}"
            self._blame(step, peer, "message", text, applied)
        if sent.state is not None:
            own = jax.device_get(self.own[peer])
            replayed = Claim(commitment, tree_hash(own))
            strays = replayed.state != sent.state
            if strays:
                text = f"committed to state {sent.state[:12]}, its replay gives "
                self._blame(step, peer, "state", text + replayed.state[:12], applied)
            if peer not in self.strayed:
                self._judge_checks(entry, peer, replayed)
            (self.strayed.add if strays else self.strayed.discard)(peer)
        return commitment != sent.commitment

    def _judge_checks(self, entry: Entry, peer: int, replayed: Claim) -> None:
        """Blame verifiers that recomputed a peer's step with another result.

        From a state that the peer committed to falsely, an honest verifier's result differs too.
        """
        evidence = entry.evidence
        claims = [(check.verifier, check.found) for check in evidence.checks if check.peer == peer]
        for ruling in evidence.rulings:
            if ruling.peer == peer:
                claims += ruling.found.items()
        for judge, claim in claims:
            if claim != replayed:
                text = f"recomputed the step of peer {peer} as {claim.message[:12]}, "
                text += f"its replay gives {replayed.message[:12]}"
                self._blame(entry.round.step, judge, "check", text, False)

    def _is_merged(self, entry: Entry, peer: int) -> bool:
        """Return whether a replayed round's message reached the params, then or later."""
        return (peer, entry.round.step) in self._merged

    # ---- Who is to blame ----

    def _blame(self, step: int, peer: int, kind: str, text: str, applied: bool) -> None:
        """Keep a replayed peer's first finding of a window, and the first that got into params."""
        findings = [finding for finding in self.found if finding.peer == peer]
        if not findings or (applied and not any(finding.applied for finding in findings)):
            self.found.append(Finding(step, peer, kind, text, applied))

    def _compare_states(self, step: int) -> None:
        """Compare the replayed state with what was committed to at a snapshot."""
        transcript = self.replay.transcript
        recorded = transcript.hashes(step, self.replay.setup.run.peers.count)
        self.params.compare(recorded)
        before = (entry for entry in transcript.window(self.window) if entry.round.step <= step)
        ejected = {peer for entry in before for peer in entry.decision.ejected}
        for peer, own in self.own.items():
            state, committed = tree_hash(jax.device_get(own)), recorded.own[peer]
            if committed not in (None, state):
                text = f"committed to state {committed[:12]}, its replay gives {state[:12]}"
                # an ejected peer's state is never used
                self._blame(step, peer, "state", text, peer not in ejected)
