"""Replay: the very programs of training, on the same data, to the same hashes.

The unit is a window: one peer from one snapshot to the next. A replayed window must give every
message that the peer committed to, and the hash of its state at the next snapshot. On the way the
params are recomputed from the payloads, so that their chain of hashes is checked from snapshot to
snapshot whether a peer is replayed or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup, device_groups
from lockstep.programs.replica import Replica
from lockstep.programs.train_step import Work
from lockstep.protocol.dispute import Claim
from lockstep.swarm.outbox import TravellingMessages
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.wire import exchange
from lockstep.wire import message as wire
from lockstep.wire.commitment import tree_hash
from pipeline import runfile
from pipeline.audit import sketches, verdict_text
from pipeline.audit.tolerance import (
    OwnDistance,
    PeersOfWindows,
    distance_of_state,
    distance_of_update,
    distances_by_kind,
    furthest,
    limit,
    own_limits,
    repeated,
)
from pipeline.audit.verdict import Finding, Varied
from pipeline.start.begin import Setup


@dataclass(frozen=True)
class Replay:
    """What an auditor replays windows with.

    Attributes:
      setup: The auditor's own set-up of the run.
      transcript: The transcript to check, which has passed the audit.
      bitwise: Whether bits must be equal; else distances must be small.
      present: The windows, and peers of each, whose snapshots and rows are here: all of a whole
        run's, some in a bundle or a publication.
      varied: How far the auditor's honest messages are from such of other bits, where measured.
    """

    setup: Setup
    transcript: Transcript
    bitwise: bool
    present: PeersOfWindows
    varied: Varied | None = None

    @property
    def kept(self) -> bool:
        """Whether messages are kept; else a window is replayed for all its peers or none."""
        return self.setup.programs.form.kept

    @property
    def merges_exactly(self) -> bool:
        """Whether params follow from messages to the bit: on any machine, where these are kept."""
        return self.bitwise or (self.kept and not self.setup.programs.unruled)

    @cached_property
    def repeats(self) -> float | None:
        """Largest distance among the auditor's honest repeats of a step, where it takes any."""
        return None if self.bitwise else repeated(self.setup, self.transcript, self.present)

    @property
    def limit(self) -> float | None:
        """Largest accepted distance of a message from its replay; None where bits are compared."""
        if self.bitwise:
            return None
        return limit(self.setup.run, self.repeats, self.varied and self.varied.distance)

    @property
    def params_limit(self) -> float | None:
        """Largest accepted distance of a window's last params; None where they are exact.

        Also of what the optimizer shares then.
        """
        if self.merges_exactly:
            return None
        return limit(self.setup.run, self.repeats, self.varied and self.varied.params)

    @property
    def own_limits(self) -> dict[str, float] | None:
        """Largest accepted distances of what a peer owns after a window; None: see `own_limits`."""
        return None if self.bitwise else own_limits(self.setup.run, self.varied)

    @cached_property
    def groups(self) -> list[DeviceGroup]:
        """The device groups on which windows can be replayed, side by side."""
        return device_groups(jax.devices(), self.setup.programs.parts)

    def window(
        self,
        window: runfile.Window,
        peers: Sequence[int],
        advance: Callable[[], None],
        group: DeviceGroup | None = None,
    ) -> list[Finding]:
        """Check the chain of params over a window, and replay some of its peers, on a device group.

        If messages are not kept and `peers` is empty, nothing is done. `advance` is called after
        each round.
        """
        if not self.kept and not peers:
            return []
        return WindowReplay(self, window, peers, group or self.groups[0]).findings(advance)


class WindowReplay:
    """A window's replay in progress: `replica` has the params, and `own` what each peer owns."""

    def __init__(
        self, replay: Replay, window: runfile.Window, peers: Sequence[int], group: DeviceGroup
    ):
        self.setup, self.transcript, self.window = replay.setup, replay.transcript, window
        self.bitwise, self.kept, self.limit = replay.bitwise, replay.kept, replay.limit
        self.merges_exactly, self.params_limit = replay.merges_exactly, replay.params_limit
        self.own_limits = replay.own_limits
        self.sketched = replay.transcript.header.sketched
        like = replay.setup.start.state
        agreed = self.transcript.agreed(window.opening, like)
        self.replica = Replica.put(replay.setup.programs, group, *agreed)
        self.own = {
            peer: group.put(self.transcript.own(window.opening, peer, like.own[peer]))
            for peer in peers
        }
        self.travelling = TravellingMessages()  # none when a window begins
        self.merged = {
            (entry.round.computed_in(peer), peer)
            for entry in self.transcript.window(window)
            for peer in entry.decision.applied
        }
        self.found: list[Finding] = []
        self.lost = False  # the params of a round are not those that were
        self.false = set[int]()  # peers that sent another message in the round than replayed
        self.ejected = set[int]()  # by then: what they own gets nowhere any more
        self.strayed: set[int] = set()  # peers that last committed to another state than replayed

    def findings(self, advance: Callable[[], None]) -> list[Finding]:
        """Recompute the window's rounds, and compare the state at every snapshot."""
        for entry in self.transcript.window(self.window):
            self._join(entry)
            replayed = self._step(entry)
            applied = self._applied(entry, replayed)
            if applied is None:  # what was applied in place of a replayed message is not kept
                return self.found
            self._receive(entry, applied)
            self.ejected |= entry.decision.ejected.keys()
            if entry.checkpointed is not None:
                self._compare_params(entry.round.step, "ended the epoch", entry.checkpointed.params)
            if entry.round.step in self.transcript.snapshots:
                self._compare_states(entry.round.step)
            advance()
        return self.found

    def _receive(self, entry: Entry, applied: dict[int, Tree]) -> None:
        """Everybody applies the messages that the round decided on."""
        sequences, count = entry.round.sequences, self.setup.run.peers.count
        step, ages = entry.round.step, entry.round.ages
        self.replica = self.replica.receive(applied, sequences, count, step, ages)

    def _join(self, entry: Entry) -> None:
        """Peers that join take over the params; they, and silent ones, begin with a new state."""
        for peer in (*entry.round.joined, *entry.evidence.silent):
            if peer in self.own:
                self.own[peer] = self.replica.new_own()
                self.strayed.discard(peer)
        if entry.joined_params is not None:
            self._compare_params(entry.round.step, "were given to peers", entry.joined_params)

    def _compare_params(self, step: int, what: str, recorded: str) -> None:
        """Compare the params with a hash that the transcript has of them."""
        if not self.merges_exactly:
            return
        params = tree_hash(jax.device_get(self.replica.params))
        if params != recorded:
            text = f"the params that {what} are {recorded[:12]}, expected {params[:12]}"
            self._blame_author(step, text)

    def _step(self, entry: Entry) -> dict[int, Tree]:
        """Recompute the messages of the replayed peers, and blame who sent another.

        A peer goes on from its recomputed state where bits are compared, else from what it sent,
        unless that is false: its own state follows from the truth, as an honest one would.
        """
        self._align(entry)
        self.false.clear()
        before = {} if self.own_limits is None else dict(self.own)
        results = {peer: self._take(entry, peer) for peer in self._senders(entry)}
        results = jax.device_get(results)
        replayed = {peer: message for peer, (message, _) in results.items()}
        if not self.bitwise and self.sketched:
            self._judge_sketches(entry, replayed)
        for peer, (message, distance) in results.items():
            if self.bitwise:
                self._judge(entry, peer, self._commit(entry, peer, message).hex())
            elif distance is not None:
                self._judge_distance(entry, peer, distance)
                if peer in self.false and peer in before:
                    work = self.work(entry, peer)
                    self.own[peer] = self.replica.step(before[peer], work, entry.round.step).own
        return replayed

    def _align(self, entry: Entry) -> None:
        """Peers that have nothing to train on adopt the last round's commit."""
        plan = entry.round
        for peer in plan.idle.difference(entry.evidence.silent).intersection(self.own):
            self.own[peer] = self.replica.align(self.own[peer], plan.step)

    def _senders(self, entry: Entry) -> list[int]:
        return [peer for peer in self.own if peer in entry.evidence.messages]

    def work(self, entry: Entry, peer: int) -> Work:
        """Return a peer's work in a round."""
        plan, setup = entry.round, self.setup
        span = plan.assignment[peer]
        return setup.settings.work(setup.programs, setup.data, span, plan.trainers)

    def _take(self, entry: Entry, peer: int) -> tuple[Tree, jax.Array | None]:
        """Take a peer's step: its message, and how far what it sent is from it, if compared so."""
        work, step, own = self.work(entry, peer), entry.round.step, self.own[peer]
        sent = self.sent(entry, peer) if self.kept and not self.bitwise else None
        if sent is None:
            result = self.replica.step(own, work, step)
            self.own[peer] = result.own
            return result.message, None
        distance, self.own[peer] = self.replica.compare(own, work, step, sent)
        return sent, distance

    def _commit(self, entry: Entry, peer: int, message: Tree) -> bytes:
        if entry.evidence.messages[peer].root is None:  # of older transcripts, large ones too
            return exchange.commit_to_fields(wire.fields(message), peer, entry.round)
        return exchange.commit(message, peer, entry.round, self.setup.programs.form)

    def sent(self, entry: Entry, peer: int) -> Tree | None:
        """Return a peer's message, or None if its bytes do not decode."""
        try:
            return self.transcript.message(entry.evidence.messages[peer], self.setup.programs.form)
        except wire.WireError:
            return None

    def _judge(self, entry: Entry, peer: int, commitment: str) -> None:
        """Blame whose claim differs from the replay: the peer, its verifier or who ruled."""
        message, applied = entry.evidence.messages[peer], self._is_merged(entry, peer)
        step = entry.round.step
        if commitment != message.commitment:
            text = f"sent {message.commitment[:12]}, its replay gives {commitment[:12]}"
            self.false.add(peer)
            self._blame(step, peer, "message", text, applied)
        if message.state is None:
            return
        replayed = Claim(commitment, tree_hash(jax.device_get(self.own[peer])))
        strays = replayed.state != message.state
        if strays:
            text = f"committed to state {message.state[:12]}, its replay gives "
            self._blame(step, peer, "state", text + replayed.state[:12], applied)
        if peer not in self.strayed:
            self._judge_checks(entry, peer, replayed)
        (self.strayed.add if strays else self.strayed.discard)(peer)

    def _judge_checks(self, entry: Entry, peer: int, replayed: Claim) -> None:
        """Blame who recomputed a peer's step with another result.

        From a state that the peer committed to falsely, an honest verifier gets another one too.
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

    def _judge_sketches(self, entry: Entry, replayed: dict[int, Tree]) -> None:
        """Blame whose pieces are far from the replay's; nobody, where most peers' are."""
        distances = sketches.distances(self.setup, self.transcript, entry, replayed)
        named, astray = sketches.to_blame(distances, self.limit)
        for peer, distance in named.items():
            self._judge_distance(entry, peer, distance)
        if astray:
            self.lost = True
            text = f"{verdict_text.peers(astray)} sent pieces that stray no more than others' from "
            text += f"a replay, by {max(distances[peer] for peer in astray):.3g}, expected at most "
            text += f"{self.limit:.3g}: a lie that no drawn piece shows came before"
            self._blame_author(entry.round.step, text)

    def _judge_distance(self, entry: Entry, peer: int, distance: float) -> None:
        if not distance <= self.limit:
            text = f"sent a message at distance {distance:.3g} from its replay's, "
            text += f"expected at most {self.limit:.3g}"
            self.false.add(peer)
            self._blame(entry.round.step, peer, "message", text, self._is_merged(entry, peer))

    def _is_merged(self, entry: Entry, peer: int) -> bool:
        """Whether a message of the round got into the params, in that round or in a later one."""
        return (entry.round.step, peer) in self.merged

    def _blame(self, step: int, peer: int, kind: str, text: str, applied: bool) -> None:
        """Keep a peer's first finding of a window, and the first that got into the params."""
        known = [finding for finding in self.found if finding.peer == peer]
        if not known or (applied and not any(finding.applied for finding in known)):
            self.found.append(Finding(step, peer, kind, text, applied))

    def _blame_author(self, step: int, text: str) -> None:
        self.found.append(Finding(step, None, "params", text, True))

    def _applied(self, entry: Entry, replayed: dict[int, Tree]) -> dict[int, Tree] | None:
        """The messages that everybody applied, or None if one of them is not kept.

        A false message that nobody merges, in this round or later, does not count.
        """
        decision, evidence = entry.decision, entry.evidence
        needed = evidence.messages.keys() & {*decision.applied, *decision.travelling}
        if self.kept:
            own = {peer: self.sent(entry, peer) for peer in needed}
        elif self.lost or any(self._is_merged(entry, peer) for peer in needed & self.false):
            return None
        else:
            own = {peer: replayed[peer] for peer in needed}
        return self.travelling.take(own, entry.round, decision)

    def _compare_states(self, step: int) -> None:
        """Compare the state with what was committed to at a snapshot."""
        params, shared = jax.device_get((self.replica.params, self.replica.shared))
        recorded = self.transcript.hashes(step, self.setup.run.peers.count)
        if self.merges_exactly:
            if (tree_hash(params), tree_hash(shared)) != (recorded.params, recorded.shared):
                self._blame_author(step, "the params do not follow from the window's messages")
        elif step == self.window.last:  # the window's other snapshots are kept as hashes only
            self._compare_closing(params, shared)
        if not self.bitwise:
            if step == self.window.last:
                self._compare_owned(params)
            return
        for peer, own in self.own.items():
            state, committed = tree_hash(jax.device_get(own)), recorded.own[peer]
            if state != committed:
                text = f"committed to state {committed[:12]}, its replay gives {state[:12]}"
                self._blame(step, peer, "state", text, peer not in self.ejected)

    def _compare_owned(self, params: Tree) -> None:
        """Compare what peers own after a window within a tolerance, where it is here.

        The next window is replayed from it, so whatever is planted there would go on unseen. Where
        the params are not the auditor's to the bit, nobody is blamed for what most peers have.
        """
        ends, found = (self.window.opening, self.window.last), dict[int, OwnDistance]()
        if self.own_limits is None or any(finding.peer is None for finding in self.found):
            return  # the latter: peers went on from other params than the auditor
        for peer, own in self.own.items():
            if self.transcript.has_own(self.window.last, peer):
                like = self.setup.start.state.own[peer]
                opening, closing = (self.transcript.own(step, peer, like) for step in ends)
                kinds = distances_by_kind(closing, jax.device_get(own), opening, params)
                found[peer] = furthest(kinds, self.own_limits)
        named, astray = sketches.to_blame({peer: far.ratio for peer, far in found.items()}, 1.0)
        for peer in {*named, *astray} if self.kept else named:
            text = f"committed to another state than its replay's: {found[peer]}"
            self._blame(self.window.last, peer, "state", text, peer not in self.ejected)
        if astray and not self.kept:
            text = f"what {verdict_text.peers(astray)} own strays no more than what others own: "
            text += f"{found[astray[0]]}: a lie that no drawn piece shows came before"
            self._blame_author(self.window.last, text)

    def _compare_closing(self, params: Tree, shared: Tree) -> None:
        """Compare what a window ends with within a tolerance, where messages are not kept.

        The next window is replayed from it, so whatever is planted there would go on unseen.
        """
        like, most = self.setup.start.state, self.params_limit
        opening, closing = (
            self.transcript.agreed(step, like) for step in (self.window.opening, self.window.last)
        )
        distance = distance_of_update(closing[0], params, opening[0])
        if not distance <= most:
            text = f"the params are at distance {distance:.3g} of the window's update from those "
            text += f"that follow from its messages, expected at most {most:.3g}"
            self._blame_author(self.window.last, text)
            return
        distance = distance_of_state(closing[1], shared, opening[1], params)
        if not distance <= most:
            text = f"what peers share is at distance {distance:.3g} of the window's change from "
            text += f"what follows from its messages, expected at most {most:.3g}"
            self._blame_author(self.window.last, text)
