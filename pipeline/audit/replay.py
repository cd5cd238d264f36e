"""Replay: the very programs of training, on the same data, to the same hashes.

The unit is a window: one peer from one snapshot to the next. A replayed window must give every
message that the peer committed to, and the hash of its state at the next snapshot. On the way the
params are recomputed from the payloads, so that their chain of hashes is checked from snapshot to
snapshot whether a peer is replayed or not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import DeviceGroup, device_groups
from lockstep.programs.replica import Replica
from lockstep.protocol.attestation import Claim
from lockstep.swarm.delivery import TravellingMessages
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import tree_hash
from lockstep.transcript.windows import Window
from lockstep.wire import exchange
from lockstep.wire import message as wire
from pipeline.audit import verdict_text
from pipeline.audit.audit import SketchError, read_sketch
from pipeline.audit.tolerance import (
    OwnDistance,
    PeersOfWindows,
    distance_of_state,
    distance_of_update,
    distances_by_kind,
    furthest,
    how,
    repeated,
    to_blame,
)
from pipeline.audit.verdict import Finding, ReplayComparison, Varied
from pipeline.start.begin import Setup


@dataclass(frozen=True)
class Replay:
    """The programs, data and settings with which an auditor replays windows."""

    setup: Setup
    transcript: Transcript  # it has passed the audit
    why: str | None  # bits cannot be compared, so that distances must be small; None if they can
    # Windows and peers whose snapshots and rows are here: all of a whole run, some in a bundle or a
    # publication.
    present: PeersOfWindows
    varied: Varied | None = None  # how far honest messages of other bits are apart, if measured

    @property
    def bitwise(self) -> bool:
        """Whether bits must be equal."""
        return self.why is None

    @property
    def kept(self) -> bool:
        """Whether messages are kept; else a window is replayed for all its peers or none."""
        return self.setup.programs.form.kept

    @property
    def merges_exactly(self) -> bool:
        """Whether params follow from messages to the bit, as they do if these are kept."""
        return self.bitwise or (self.kept and not self.setup.programs.unruled)

    @cached_property
    def repeats(self) -> float | None:
        """Largest distance among the auditor's honest repeats of a step, if it takes any."""
        return None if self.bitwise else repeated(self.setup, self.transcript, self.present)

    @cached_property
    def how(self) -> ReplayComparison:
        """How messages are compared with their replays, and what distances are accepted."""
        return how(self.setup.run, self.why, self.merges_exactly, self.repeats, self.varied)

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
    ) -> list[Finding]:
        """Check the chain of params over a window, and replay some of its peers.

        If messages are not kept and `peers` is empty, nothing is done.
        """
        if not self.kept and not peers:
            return []
        return WindowReplay(self, window, peers, group or self.groups[0]).findings(advance)


class WindowPeers:
    """Some peers of a window, recomputed round by round; nobody is judged.

    `replica` has the params and what peers share, `own` what each of these peers owns.
    """

    def __init__(
        self,
        setup: Setup,
        transcript: Transcript,
        window: Window,
        peers: Sequence[int],
        group: DeviceGroup,
    ):
        self.setup, self.transcript, self.window = setup, transcript, window
        like = setup.start.state
        self.replica = Replica.put(setup.programs, group, *transcript.agreed(window.opening, like))
        before = {peer: transcript.own_before(window, peer, like.own[peer]) for peer in peers}
        self.own = {peer: group.put(own) for peer, own in before.items()}
        self._travelling = TravellingMessages()  # none when a window begins

    def begin(self, entry: Entry) -> None:
        """Begin a round: some peers take over the params, those without work the last commit.

        A peer that joins or was silent has a new state.
        """
        plan, silent = entry.round, entry.evidence.silent
        for peer in (*plan.joined, *silent):
            if peer in self.own:
                self.own[peer] = self.replica.new_own()
        for peer in plan.idle.difference(silent).intersection(self.own):
            self.own[peer] = self.replica.align(self.own[peer], plan.step)

    def senders(self, entry: Entry) -> list[int]:
        """Return those of the peers that sent a message in a round."""
        return [peer for peer in self.own if peer in entry.evidence.messages]

    def work(self, entry: Entry, peer: int) -> Work:
        """Return a peer's work in a round."""
        return self.setup.work(entry.round.assignment[peer], entry.round.trainers)

    def step(self, entry: Entry, peer: int) -> Tree:
        """Take a peer's step, and return its message."""
        result = self.replica.step(self.own[peer], self.work(entry, peer), entry.round.step)
        self.own[peer] = result.own
        return result.message

    def compare(self, entry: Entry, peer: int) -> jax.Array | None:
        """Take a peer's step, and return how far what it sent is from its message.

        What it owns then follows from what it sent or, where its bytes do not decode, from the
        recomputed message; the result is None then.
        """
        sent = self.sent(entry, peer)
        if sent is None:
            self.step(entry, peer)
            return None
        distance, self.own[peer] = self.replica.compare(
            self.own[peer], self.work(entry, peer), entry.round.step, sent
        )
        return distance

    def sent(self, entry: Entry, peer: int) -> Tree | None:
        """Return a peer's message, or None if its bytes do not decode."""
        try:
            return self.transcript.message(entry.evidence.messages[peer], self.setup.programs.form)
        except wire.WireError:
            return None

    def receive(self, entry: Entry, recomputed: Mapping[int, Tree]) -> None:
        """Apply the messages that the round decided on: as kept or, if not kept, as recomputed."""
        decision, plan = entry.decision, entry.round
        needed = entry.evidence.messages.keys() & {*decision.applied, *decision.travelling}
        kept = self.setup.programs.form.kept
        own = {peer: self.sent(entry, peer) if kept else recomputed[peer] for peer in needed}
        messages = self._travelling.take(own, plan, decision)
        count = self.setup.run.peers.count
        self.replica = self.replica.receive(messages, plan.sequences, count, plan.step)


class WindowReplay:
    """A window's replay in progress: what its peers did is compared with what they should have."""

    def __init__(self, replay: Replay, window: Window, peers: Sequence[int], group: DeviceGroup):
        self.replay, self.window = replay, window
        self.peers = WindowPeers(replay.setup, replay.transcript, window, peers, group)
        self.found: list[Finding] = []
        self.strayed = set[int]()  # peers that last committed to another state than replayed
        self._merged = {
            entry.round.origin(slot)
            for entry in replay.transcript.window(window)
            for slot in entry.decision.applied
        }

    def findings(self, advance: Callable[[], None]) -> list[Finding]:
        """Recompute the window's rounds, and compare the state at every snapshot."""
        for entry in self.replay.transcript.window(self.window):
            step = entry.round.step
            self.peers.begin(entry)
            self.strayed.difference_update(entry.round.joined, entry.evidence.silent)
            if entry.joined_params is not None:
                self._compare_params(step, "were given to peers", entry.joined_params)
            recomputed, can_go_on = self._step(entry)
            if not can_go_on:  # the message applied instead of a replayed one is not kept
                return self.found
            self.peers.receive(entry, recomputed)
            if entry.checkpointed is not None:
                self._compare_params(step, "ended the epoch", entry.checkpointed.params)
            if step in self.replay.transcript.snapshots:
                self._compare_states(step)
            advance()
        return self.found

    # ---- Messages ----

    def _step(self, entry: Entry) -> tuple[dict[int, Tree], bool]:
        """Recompute the messages of the replayed peers, and blame peers that sent another.

        Also return whether the replay can go on. A false message that nobody merges, in this round
        or later, does not end it.
        """
        if self.replay.kept and not self.replay.bitwise:
            self._compare_kept(entry)
            return {}, True
        recomputed = {peer: self.peers.step(entry, peer) for peer in self.peers.senders(entry)}
        recomputed = jax.device_get(recomputed)
        if self.replay.bitwise:
            false = {p for p, message in recomputed.items() if self._is_false(entry, p, message)}
        else:
            false, astray = self._compare_sketches(entry, recomputed)
            if astray:
                return recomputed, False
        lost = not self.replay.kept and any(self._is_merged(entry, peer) for peer in false)
        return recomputed, not lost

    def _is_false(self, entry: Entry, peer: int, message: Tree) -> bool:
        """Blame the peer, its verifier or a ruling peer whose claim differs from the replay.

        Return whether the peer sent another message.
        """
        sent, applied = entry.evidence.messages[peer], self._is_merged(entry, peer)
        step, commitment = entry.round.step, self._commit(entry, peer, message).hex()
        if commitment != sent.commitment:
            text = f"sent {sent.commitment[:12]}, its replay gives {commitment[:12]}"
            self._blame(step, peer, "message", text, applied)
        if sent.state is not None:
            own = jax.device_get(self.peers.own[peer])
            replayed = Claim(commitment, tree_hash(own))
            strays = replayed.state != sent.state
            if strays:
                text = f"committed to state {sent.state[:12]}, its replay gives "
                self._blame(step, peer, "state", text + replayed.state[:12], applied)
            if peer not in self.strayed:
                self._judge_checks(entry, peer, replayed)
            (self.strayed.add if strays else self.strayed.discard)(peer)
        return commitment != sent.commitment

    def _commit(self, entry: Entry, peer: int, message: Tree) -> bytes:
        if entry.evidence.messages[peer].root is None:  # of older transcripts, large ones too
            return exchange.commit_to_fields(wire.fields(message), peer, entry.round)
        return exchange.commit(message, peer, entry.round, self.replay.setup.programs.form)

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

    def _compare_kept(self, entry: Entry) -> None:
        """Compare messages that are kept within a tolerance.

        A peer goes on from what it sent unless that is false: its own state follows from the
        truth, as an honest one would.
        """
        peers, distances = self.peers, dict[int, jax.Array]()
        own_before = {} if self.replay.how.own_limits is None else dict(peers.own)
        for peer in peers.senders(entry):
            if (distance := peers.compare(entry, peer)) is not None:
                distances[peer] = distance
        for peer, distance in jax.device_get(distances).items():
            if self._is_far(entry, peer, distance) and peer in own_before:
                peers.own[peer] = own_before[peer]
                peers.step(entry, peer)

    def _compare_sketches(
        self, entry: Entry, recomputed: Mapping[int, Tree]
    ) -> tuple[set[int], list[int]]:
        """Blame peers whose pieces are far from the replay's; nobody, if most peers' are.

        Return the peers with false messages, and stray peers that may not be to blame.
        """
        replay = self.replay
        if not replay.transcript.header.sketched:
            return set(), []
        distances = sketch_distances(replay.setup, replay.transcript, entry, recomputed)
        named, astray = to_blame(distances, replay.how.limit)
        false = {peer for peer, distance in named.items() if self._is_far(entry, peer, distance)}
        if astray:
            text = f"{verdict_text.peers(astray)} sent pieces that stray no more than others' from "
            text += f"a replay, by {max(distances[peer] for peer in astray):.3g}, expected at most "
            text += f"{replay.how.limit:.3g}: a lie that no drawn piece shows came before"
            self._blame_author(entry.round.step, text)
        return false, astray

    def _is_far(self, entry: Entry, peer: int, distance: float) -> bool:
        limit = self.replay.how.limit
        if distance <= limit:
            return False
        text = f"sent a message at distance {distance:.3g} from its replay's, "
        text += f"expected at most {limit:.3g}"
        self._blame(entry.round.step, peer, "message", text, self._is_merged(entry, peer))
        return True

    def _is_merged(self, entry: Entry, peer: int) -> bool:
        """Return whether a message of the round reached the params, then or in a later round."""
        return (peer, entry.round.step) in self._merged

    # ---- Who is to blame ----

    def _blame(self, step: int, peer: int, kind: str, text: str, applied: bool) -> None:
        """Keep a peer's first finding of a window, and the first that got into the params."""
        findings = [finding for finding in self.found if finding.peer == peer]
        if not findings or (applied and not any(finding.applied for finding in findings)):
            self.found.append(Finding(step, peer, kind, text, applied))

    def _blame_state(self, step: int, peer: int, text: str) -> None:
        """Blame a peer for its state after a round; an ejected peer's state is never used."""
        entries = self.replay.transcript.window(self.window)
        ejected = {p for e in entries if e.round.step <= step for p in e.decision.ejected}
        self._blame(step, peer, "state", text, peer not in ejected)

    def _blame_author(self, step: int, text: str) -> None:
        self.found.append(Finding(step, None, "params", text, True))

    # ---- Params and states ----

    def _compare_params(self, step: int, what: str, recorded: str) -> None:
        """Compare the params with their hash in the transcript."""
        if self.replay.merges_exactly:
            params = tree_hash(jax.device_get(self.peers.replica.params))
            if params != recorded:
                text = f"the params that {what} are {recorded[:12]}, expected {params[:12]}"
                self._blame_author(step, text)

    def _compare_states(self, step: int) -> None:
        """Compare the state with what was committed to at a snapshot."""
        replay, is_last = self.replay, step == self.window.last
        replica = self.peers.replica
        params, shared = jax.device_get((replica.params, replica.shared))
        recorded = replay.transcript.hashes(step, replay.setup.run.peers.count)
        if replay.merges_exactly:
            if (tree_hash(params), tree_hash(shared)) != (recorded.params, recorded.shared):
                self._blame_author(step, "the params do not follow from the window's messages")
        elif is_last:  # the window's other snapshots are kept as hashes only
            self._compare_closing(params, shared)
        if not replay.bitwise:
            if is_last:
                self._compare_owned(params)
            return
        for peer, own in self.peers.own.items():
            state, committed = tree_hash(jax.device_get(own)), recorded.own[peer]
            if committed not in (None, state):
                text = f"committed to state {committed[:12]}, its replay gives {state[:12]}"
                self._blame_state(step, peer, text)

    def _compare_owned(self, params: Tree) -> None:
        """Compare what peers own after a window within a tolerance, where it is here.

        The next window is replayed from it, so whatever is planted there would go on unseen. Where
        the params are not the auditor's to the bit, nobody is blamed for what most peers have.
        """
        replay, last, distances = self.replay, self.window.last, dict[int, OwnDistance]()
        if replay.how.own_limits is None or any(finding.peer is None for finding in self.found):
            return  # the latter: peers went on from other params than the auditor
        for peer, own in self.peers.own.items():
            if replay.transcript.has_own(last, peer):
                like = replay.setup.start.state.own[peer]
                opening, closing = (
                    replay.transcript.own(step, peer, like) for step in (self.window.opening, last)
                )
                kinds = distances_by_kind(closing, jax.device_get(own), opening, params)
                distances[peer] = furthest(kinds, replay.how.own_limits)
        named, astray = to_blame({peer: d.ratio for peer, d in distances.items()}, 1.0)
        for peer in {*named, *astray} if replay.kept else named:
            text = f"committed to another state than its replay's: {distances[peer]}"
            self._blame_state(last, peer, text)
        if astray and not replay.kept:
            text = f"what {verdict_text.peers(astray)} own strays no more than what others own: "
            text += f"{distances[astray[0]]}: a lie that no drawn piece shows came before"
            self._blame_author(last, text)

    def _compare_closing(self, params: Tree, shared: Tree) -> None:
        """Compare the end of a window within a tolerance, where messages are not kept.

        The next window is replayed from it, so whatever is planted there would go on unseen.
        """
        transcript, like = self.replay.transcript, self.replay.setup.start.state
        limit, last = self.replay.how.params_limit, self.window.last
        opening, closing = (transcript.agreed(step, like) for step in (self.window.opening, last))
        if not (gap := distance_of_update(closing[0], params, opening[0])) <= limit:
            text = f"the params are at distance {gap:.3g} of the window's update from those that "
            text += "follow"
        elif not (gap := distance_of_state(closing[1], shared, opening[1], params)) <= limit:
            text = f"what peers share is at distance {gap:.3g} of the window's change from what "
            text += "follows"
        else:
            return
        self._blame_author(last, f"{text} from its messages, expected at most {limit:.3g}")


def sketch_distances(
    setup: Setup, transcript: Transcript, entry: Entry, recomputed: Mapping[int, Tree]
) -> dict[int, float]:
    """Return how far the pieces that peers sent are from recomputed messages, by peer.

    Broken messages have none. A piece that is not what the audit found it to be is infinitely far.
    """
    distances, pieces = {}, setup.programs.form.pieces
    for peer, message in recomputed.items():
        if peer in entry.evidence.broken:
            continue
        try:
            sent = read_sketch(setup, transcript, entry, peer)
        except SketchError:
            distances[peer] = float("inf")
            continue
        distances[peer] = pieces.distance(wire.fields(message), sent)
    return distances
