"""Rounds over a store: those who live here train, and everybody follows what the store shows."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.optimizer import Tree
from lockstep.protocol import driver
from lockstep.protocol.attestation import Hash
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.delivery import Delivered
from lockstep.swarm.peers import SimulatedPeers, StepResult
from lockstep.swarm.swarm import (
    Exchanged,
    FinishedRound,
    RoundStart,
    RoundWork,
    Swarm,
    evidence_of,
    mean_loss,
)
from lockstep.transcript.entry import Entry
from lockstep.transcript.trees import tree_hash
from lockstep.wire import bound
from parts.volunteers import slots
from parts.volunteers.bodies import LeaveNotice, MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.beyond import catch_up
from parts.volunteers.chain.links import FalseLinkError, Head, RoundLink
from parts.volunteers.chain.payloads import Expected, MessageInTime, Refused, judge
from parts.volunteers.chain.place import NOTICES, LinkInSlot, RunInStore, Volunteer, Waits
from parts.volunteers.chain.slate import EARLIER, Slate
from parts.volunteers.chain.turns import Turns, in_order, put_before, turns_to_close
from parts.volunteers.signed import sign
from parts.volunteers.store.verbs import StoredObject
from parts.volunteers.training.states import States
from parts.volunteers.training.waiting import Waiting
from pipeline.stage import signals
from pipeline.stage.devices import environment_hash

SELDOM = 4  # one of so many looks goes to all slots for links
FIRST_LOOK = 16  # the first look is after this part of what it waited in the round before


class StoredSwarm(Swarm):
    """A run's peers. One of them lives here, or none; the store shows what the others do.

    place: The run in its store.
    volunteer: Who trains here; None where nobody does.
    takes: Whether a snapshot is taken after a round.
    states: Where states are written.
    """

    peers: SimulatedPeers

    def __init__(
        self,
        place: RunInStore,
        volunteer: Volunteer | None,
        takes: Callable[[int], bool],
        states: States,
        *swarm: Any,
        **more: Any,
    ):
        super().__init__(*swarm, **more)
        self.place, self.volunteer, self.takes, self.states = place, volunteer, takes, states
        self.waiting = Waiting(place, volunteer)
        self.sits_out = False  # whether its own state differs from the one others computed
        self.waited = False  # whether the link before was not there yet when it was looked for
        self.waits = 0.0  # seconds that it waited for it
        self.last: StoredRound | None = None  # the round before, until a link names its link

    def take_round(self, progress: RunProgress) -> tuple[RunProgress, FinishedRound | None]:
        """Follow the next round, and train in it if a volunteer lives here.

        Where another link closed the round before after all, that round is returned once more.
        """
        askers = self.place.head.asked
        progress, waited = self.waiting.until_enough(driver.ask(progress, askers))
        progress, round_ = driver.next_round(progress)
        if round_ is None:
            return progress, None
        self.place.read_admissions()
        start = RoundStart(round_, (*askers, *waited), self.join(round_))
        current = StoredRound(self, progress, start)
        try:
            outcome = current.take()
        except AnotherWayError as other:
            return other.outcome
        self.last = current
        return outcome


class RoundResult(NamedTuple):
    """What a round came to by some messages."""

    progress: RunProgress
    finished: FinishedRound
    hashes: tuple[Hash, Hash, Hash | None]  # of params, of the shared state, of a file of both


class AnotherWayError(Exception):
    """Another link closed the round before than was read, and what it came to."""

    def __init__(self, outcome: tuple[RunProgress, FinishedRound]):
        super().__init__()
        self.outcome = outcome


@dataclass
class StoredRound:
    """A round in progress."""

    swarm: StoredSwarm
    progress: RunProgress
    start: RoundStart
    shown: dict[int, MessageInTime | Refused] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)  # later than by the store's clock
    closable: float | None = None  # since when it could be closed
    composed: float | None = None  # since when the volunteer could put its link
    worked: bool = False  # whether the volunteer has taken its step
    sent: bytes | None = None  # the volunteer's payload, once its message is in the store
    left: bool = False  # whether it has said that it leaves
    link: str = ""  # SHA-256 of the link that closed it
    ended: Turns = Turns((), 0, 0.0)  # the turns to close it, and below who sent a message
    senders: set[int] = field(default_factory=set)
    doubted: set[int] = field(default_factory=set)  # whose link named another before it

    def __post_init__(self) -> None:
        self.place, self.round = self.swarm.place, self.start.round
        self.ejected, self.head = self.progress.state.ejected, self.place.head
        drawn, *rest = self.place.draws.to_json()
        self.draws = [[*drawn], *rest]  # before the round
        self.slate = self._slate()
        peers = self.swarm.peers
        self.before: tuple[Tree, Tree] = peers.params_and_shared()
        self.expected = Expected(
            self.place.run,
            self.round,
            peers.params_hash(),
            self.head.seconds,
            self.place.document.payload_bytes,
            peers.programs.form,
            self.place.terms.limit,
        )

    @property
    def me(self) -> Volunteer | None:
        """The volunteer that trains here, unless it was ejected."""
        me = self.swarm.volunteer
        return None if me is None or me.peer in self.ejected else me

    @property
    def turns(self) -> Turns:
        """The turns to close the round, by what was read of it."""
        place = self.place
        return turns_to_close(self.round, self.shown, self.head, place.terms, place.document.slots)

    @property
    def likely(self) -> Turns:
        """The turns if all messages come, as long as nobody knows whether they do."""
        if self.closable is not None:
            return self.turns
        members, all_slots = self.round.peers, range(self.place.document.slots)
        order = in_order(self.round.seed, self.round.assignment, members, all_slots)
        return Turns(order, 0, self.place.terms.turn)

    def take(self) -> tuple[RunProgress, FinishedRound]:
        """Take part in the round, if a volunteer lives here, and return what it came to."""
        self._work()
        self.swarm.waited, started = False, time.monotonic()
        waits = Waits(max(0.05, self.swarm.waits / FIRST_LOOK))
        for number in itertools.count(1):
            self._leave_if_asked()  # first, so that it is there before the link
            seldom = number % SELDOM == 0 or self.place.looks_once
            chosen = self._look(everywhere=seldom)
            if chosen is not None:
                break
            if seldom and (self.slate.signed(self.ejected) or self.slate.refused):
                self.place.check_payloads(self.round.step)
            if self.slate.first(self.turns, self.ejected) is None:
                catch_up(self.slate)
            self.swarm.waited = True
            if not self._close():
                waits.sleep(at_once=self.sent is None)
        self.swarm.waits = time.monotonic() - started
        return self._end(*chosen)

    def again(self) -> tuple[RunProgress, FinishedRound] | None:
        """Look once more which link closed the round; return what it came to if it is another."""
        refused, self.slate = self.slate.refused, self._slate()
        names = self.slate.list()
        first = self.slate.first(self.ended, {*self.ejected, *refused})
        same = first is not None and self.slate.signed(())[first].sha256 == self.link
        if same and self._sent(names) <= self.senders:
            return None  # nothing new, whatever somebody's link says
        self._read_all()
        chosen = self.slate.choose(self.turns, self.ejected, self._follow, is_over=True)
        if chosen is None or chosen[0].sha256 == self.link:
            return None
        self.place.draws.restore(self.draws)
        return self._end(*chosen)

    def _sent(self, names: Mapping[str, int]) -> set[int]:
        """Return who has a record among the names of the round that is in time."""
        records = slots.names_by_peer(names, "record")
        counts = self.place.terms.counts
        senders = {p for p, n in records.items() if counts(names[n] - self.expected.began)}
        return senders.intersection(self.round.assignment)

    def _slate(self) -> Slate:
        return Slate(self.place, "closed", self.round.step, self.head.seconds)

    def _end(self, closing: LinkInSlot, outcome: RoundResult) -> tuple[RunProgress, FinishedRound]:
        """Go on from the link that closed the round."""
        named = {*closing.link.false_links, *outcome.progress.state.ejected}
        owed = tuple(sorted({*self.slate.refused} - named))
        self.place.head = Head(closing.sha256, closing.stored.seconds, closing.link.asked, owed)
        me = self.swarm.volunteer
        self.swarm.states.closed(closing.link, mine=me is not None and me.peer == closing.link.peer)
        self._account(closing.link)
        self.place.say(_line(closing.link, outcome.finished.entry))
        self.place.followed(closing.link, self.expected.began)
        self.link, self.ended, self.senders = closing.sha256, self.turns, {*self.shown}
        self.shown.clear()  # with all messages
        return outcome.progress, outcome.finished

    def _look(self, *, everywhere: bool) -> tuple[LinkInSlot, RoundResult] | None:
        """Look for the link that closes the round: mostly where it is expected."""
        if everywhere:
            self.slate.list()
        else:
            first = next((p for p in self.likely.order if not self.slate.has(p)), None)
            if first is not None and not (self.me and self.me.peer == first):
                self.slate.read([first])
        signed = self.slate.signed(self.ejected)
        if not signed:
            return None
        self._doubt({p: item.link.previous for p, item in signed.items() if item.link is not None})
        self._read_all()
        return self.slate.choose(self.turns, self.ejected, self._follow)

    def _doubt(self, previous: Mapping[int, str]) -> None:
        """Look at the previous link once more, if links of some peers name another in `previous`.

        Raises:
          AnotherWayError: It is another one.
        """
        last = self.swarm.last
        others = {peer for peer, sha256 in previous.items() if sha256 != self.head.sha256}
        if last is None or last.link != self.head.sha256 or others <= self.doubted:
            return
        self.doubted |= others
        other = last.again()
        if other is not None:
            self.swarm.sits_out |= self.worked  # its own state is a round ahead
            raise AnotherWayError(other)
        self._undo()

    # ---- The volunteer's part ----

    def _work(self) -> None:
        """Take the volunteer's step and put its message, unless the round was closed without."""
        me, step = self.me, self.round.step
        if me is None:
            return
        if me.peer in self.round.joined:
            self.swarm.sits_out = False  # it begins with a new state
        if me.peer not in self.round.peers:
            self.swarm.waiting.ask(self.progress)
            return
        if self.swarm.sits_out or self._closed_without(me.peer):
            return
        done = self.swarm.work(self.round, self.progress.unready).results
        self.worked = True
        if me.peer not in done:  # nothing was assigned
            return
        sent, loss = self.swarm.delivery.encoded(done, self.round)[0][me.peer], done[me.peer].loss
        payload = bytes(sent.payload).ljust(self.place.document.payload_bytes, b"\0")
        own = tree_hash(self.swarm.peers.own(me.peer)) if self.swarm.takes(step) else None
        record = MessageRecord(
            run=self.place.run,
            round=step,
            peer=me.peer,
            span=self.round.assignment[me.peer],
            base=self.expected.base,
            commitment=sent.commitment.hex(),
            bytes=len(sent.payload),
            sha256=hashlib.sha256(payload).hexdigest(),
            loss=loss,
            environment=environment_hash(me.environment),
            own=own,
        )
        if self.place.put(slots.of_peer(step, me.peer, "payload"), payload):
            name = slots.of_peer(step, me.peer, "record")
            if self.place.put(name, sign(record, me.key, slots.RECORD_BYTES)):
                self.sent = payload

    def _leave_if_asked(self) -> None:
        """Leave after its message, once this process is asked to stop; the round is still taken."""
        me, step = self.me, self.round.step
        if me is None or self.sent is None or self.left or not signals.is_asked():
            return
        notice = LeaveNotice(run=self.place.run, round=step, peer=me.peer)
        name = slots.of_peer(step, me.peer, "leave")
        self.left = self.place.put(name, sign(notice, me.key, slots.LEAVE_BYTES))

    def _closed_without(self, peer: int) -> bool:
        """Return whether a link is there already, and this peer's message is not in time for it."""
        if self.swarm.waited:  # so the round has only begun
            return False
        self.slate.list()
        if not self.slate.signed(self.ejected):
            return False
        self._read_all()
        return self.slate.first(self.turns, self.ejected) is not None and peer not in self.shown

    def _account(self, link: RoundLink) -> None:
        """Begin anew where others take the volunteer for silent, or for what it is not."""
        me = self.swarm.volunteer
        if me is None or me.peer not in self.round.assignment:
            return
        is_in = me.peer in link.messages
        self.swarm.sits_out |= is_in and not self.worked
        if not (is_in and self.worked):  # at the params before the round, as others take it
            peers = self.swarm.peers
            after = peers.params_and_shared()
            self._undo()
            peers.restart(me.peer)
            peers.agree(*after)

    # ---- What everybody computes ----

    def _read(self, names: Collection[str] | None = None) -> None:
        """Look at the records and payloads that are new.

        `names` are the names of the round. If they are None, it looks at one peer after the other,
        up to the first whose message is not there.
        """
        for peer in self.round.assignment:
            before = self.shown.get(peer)
            if before is not None and not links.may_change(before):
                continue
            name = slots.of_peer(self.round.step, peer, "record")
            record = None
            if names is None or name in names:
                record = self.place.look(name, slots.RECORD_BYTES)
            if record is not None and self.place.terms.counts(record.seconds - self.expected.began):
                key = self.place.admissions.key(peer, self.expected.began)
                verdict = judge(peer, record, self._payload(peer, record), key, self.expected)
                if verdict is not None:
                    self.shown[peer] = verdict
            if names is None and peer not in self.shown:
                return

    def _payload(self, peer: int, record: StoredObject) -> StoredObject | None:
        if self.sent is not None and self.me and self.me.peer == peer:
            return StoredObject(self.sent, record.seconds)  # which was put before it
        name = slots.of_peer(self.round.step, peer, "payload")
        return self.place.look(name, self.place.document.payload_bytes)

    def _read_all(self) -> None:
        """Look at all records and payloads; list them where one is missing."""
        self._read()
        if not links.is_whole(self.round, self.shown):
            self._read(self.slate.list())

    def _follow(self, link: RoundLink, seconds: int) -> RoundResult:
        """Return what the round came to by a link that was put at that time.

        Raises:
          FalseLinkError: It does not follow, and the params are as before it.
        """
        links.check_link(
            link,
            self.head,
            self.round,
            self.shown,
            joins=self._notices("join", link.asked, seconds),
            leaves=self._leaves(link.left, seconds),
            refused=self.slate.refused,
        )
        outcome = self._settle([*link.messages], link.left, link.false_links)
        try:
            applied, after = outcome.finished.entry.decision.applied, outcome.progress
            links.check_outcome(link, applied, outcome.hashes, after)
        except FalseLinkError:
            self._undo()
            raise
        return outcome

    def _notices(self, what: str, peers: Iterable[int], before: float) -> list[int]:
        """Return those of some peers that put a notice in the round before a time, ascending.

        A link that names a later one is false for ever, no matter who reads it when.
        """
        names = [slots.of_peer(self.round.step, peer, what) for peer in peers]
        notices = self.place.notices(self.round.step, what, names, self.expected.began)
        return put_before(before, notices)

    def _leaves(self, peers: Iterable[int], before: float) -> list[int]:
        state = self.progress.state
        able = state.healthy_members.union(state.pending)
        return self._notices("leave", able.intersection(peers), before)

    def _settle(
        self, senders: list[int], left: tuple[int, ...], false_links: tuple[int, ...]
    ) -> RoundResult:
        """Settle the round by the messages of some senders."""
        self._undo()
        counted: dict[int, MessageInTime] = {p: self.shown[p] for p in sorted(senders)}
        sent = {peer: item.sent for peer, item in counted.items()}
        intact = {p: item.sent for p, item in counted.items() if not item.broken}
        beyond = bound.beyond({peer: item.largest for peer, item in intact.items()})
        received = {p: item.message for p, item in intact.items() if p not in beyond}
        arrivals = {peer: float(item.seconds) for peer, item in counted.items()}
        delivered = Delivered(sent, {}, {}, received, arrivals)
        worked = self._claimed_work(counted)
        evidence = replace(evidence_of(worked, delivered), false_links=false_links)
        payloads = self.swarm.kept_payloads(delivered, evidence, self.round)
        own = {p: item.body.own for p, item in counted.items() if item.body.own is not None}
        if self.place.document.run["peers"].get("bits") != "everywhere":
            messages = {
                p: replace(item, environment=counted[p].body.environment)
                for p, item in evidence.messages.items()
            }
            evidence = replace(evidence, messages=messages)
        exchanged = Exchanged(evidence, received, worked.loss, left, *payloads, own)
        progress, finished = self.swarm.settle(self.progress, self.start, exchanged)
        params, shared = self.swarm.peers.params_and_shared()
        state = self.swarm.states.write(self.round.step, params, shared)
        hashes = self.swarm.peers.params_hash(), tree_hash(jax.device_get(shared)), state
        return RoundResult(progress, finished, hashes)

    def _claimed_work(self, counted: Mapping[int, MessageInTime]) -> RoundWork:
        """Return what the senders say that they did."""
        done = {p: StepResult(item.sent, item.body.loss) for p, item in counted.items()}
        losses = {p: item.loss for p, item in done.items() if item.loss is not None}
        silent = tuple(sorted(self.round.assignment.keys() - counted.keys()))
        return RoundWork({}, done, mean_loss(losses, self.swarm.weights(self.round)), silent)

    def _undo(self) -> None:
        """Return all peers to what they agreed on before the round."""
        params, shared = self.before
        if self.swarm.peers.programs.merges_in_parts:  # which takes the memory of what is shared
            shared = jax.tree.map(jnp.copy, shared)
        self.swarm.peers.agree(params, shared)

    # ---- Closing a round ----

    def _close(self) -> bool:
        """Put the link that closes the round, if it may come and it is the volunteer's turn.

        Return whether it did.
        """
        me, now = self.me, time.monotonic()
        if me is None or self.slate.has(me.peer) or now - self.began < self.likely.delay(me.peer):
            return False
        # the link before was put earlier than that, and both times are rounded down
        is_over = self.place.terms.is_over(int(now - self.began) - 1)
        if self.closable is None:
            self._read_all() if is_over else self._read()
            if not is_over and not links.is_whole(self.round, self.shown):
                return False
            self.closable = now
        if now - self.closable < self.turns.delay(me.peer):
            return False
        names = self.slate.list()
        if is_over:
            self._read(names)
        if self.slate.first(self.turns, self.ejected) is not None:
            return False  # another link may count
        notices = [name for kind in NOTICES for name in slots.names_by_peer(names, kind).values()]
        earlier, self.composed = self.slate.earlier(notices), self.composed or now
        if len(earlier) < len(notices) and now - self.composed <= EARLIER:
            return False  # once: the link names none that was put in its own second
        name = slots.of_peer(self.round.step, me.peer, "closed")
        self.place.put(name, sign(self._compose(me, earlier), me.key, self.place.link_bytes))
        self.slate.read([me.peer])
        return True

    def _compose(self, me: Volunteer, notices: Collection[str]) -> RoundLink:
        """Return the link that closes the round, by what was read of it."""
        joined = self._notices("join", slots.names_by_peer(notices, "join"), math.inf)
        left = tuple(self._leaves(slots.names_by_peer(notices, "leave"), math.inf))
        messages, rejected = links.linked(self.shown)
        false_links = tuple(sorted({*self.slate.refused_earlier(), *self.head.owed}))
        outcome = self._settle([*messages], left, false_links)
        return RoundLink(
            run=self.place.run,
            round=self.round.step,
            peer=me.peer,
            previous=self.head.sha256,
            asked=driver.may_ask(outcome.progress, joined),
            left=left,
            messages=messages,
            rejected=rejected,
            false_links=false_links,
            applied=outcome.finished.entry.decision.applied,
            params=outcome.hashes[0],
            shared=outcome.hashes[1],
            state=outcome.hashes[2],
        )


def _line(link: RoundLink, entry: Entry) -> str:
    """Say what is proven of a round, and what is stated."""
    merged = f"{len(link.applied)} of {len(entry.round.assignment)} messages merged"
    rejected = f", {len(link.rejected)} rejected" if link.rejected else ""
    out = entry.decision.ejected
    ejected = f", ejected: {', '.join(f'peer {p} ({why})' for p, why in out.items())}"
    seconds = max((message.seconds for message in link.messages.values()), default=0)
    loss = "no loss" if entry.loss is None else f"loss {entry.loss:.4g}"
    return (
        f"round {link.round}: proven: {merged}{rejected}{ejected if out else ''}, params "
        f"{link.params[:12]}; stated: {loss}, {seconds} s"
    )
