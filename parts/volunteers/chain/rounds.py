"""Rounds over a store: those who live here train, and everybody follows what the store shows."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.delivery import Delivered
from lockstep.swarm.peers import Done, SimulatedPeers
from lockstep.swarm.swarm import Exchanged, RoundBegun, Swarm, Taken, Worked, evidence_of
from lockstep.wire import bound
from lockstep.wire.commitment import tree_hash
from parts.volunteers import slots
from parts.volunteers.bodies import JoinRequest, LeaveNotice, MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Head, RoundLink
from parts.volunteers.chain.messages import Counted, Expected, Refused, judged
from parts.volunteers.chain.place import FoundLink, RunInStore, Waits
from parts.volunteers.keys import PrivateKey
from parts.volunteers.signed import canonical, sign
from pipeline.stage import signals


class Volunteer(NamedTuple):
    """Who trains here."""

    peer: int
    key: PrivateKey
    environment: dict[str, str]

    @property
    def environment_hash(self) -> str:
        """SHA-256 of the environment, as records have it."""
        return hashlib.sha256(canonical(self.environment)).hexdigest()


class StoredSwarm(Swarm):
    """A run's peers, of whom one lives here or none; the others are known by the store alone.

    place: The run in its store.
    volunteer: Who trains here; None where nobody does.
    takes: Whether a snapshot is taken after a round.
    """

    peers: SimulatedPeers

    def __init__(
        self,
        place: RunInStore,
        volunteer: Volunteer | None,
        takes: Callable[[int], bool],
        *swarm: Any,
        **more: Any,
    ):
        super().__init__(*swarm, **more)
        self.place, self.volunteer, self.takes = place, volunteer, takes
        self.sits_out = False  # whether the volunteer's own state is not what others take it for

    def take_round(self, progress: RunProgress) -> tuple[RunProgress, Taken | None]:
        """Follow the next round, and train in it if a volunteer lives here."""
        asked = self.place.head.asked
        self.place.read_admissions()
        progress, waited, false = self._await_members(driver.ask(progress, asked))
        progress, round_ = driver.next_round(progress)
        if round_ is None:
            return progress, None
        begun = RoundBegun(round_, (*asked, *waited), self.join(round_))
        return StoredRound(self, progress, begun, false).take()

    # ---- A run that waits for members ----

    def _await_members(
        self, progress: RunProgress
    ) -> tuple[RunProgress, tuple[int, ...], list[int]]:
        """Wait until enough have asked; return who did, and who signed false links meanwhile."""
        place, asked, false, number = self.place, tuple[int, ...](), list[int](), 0
        progress, _ = driver.next_round(progress)
        waits = Waits()
        while progress.waiting:
            name = slots.link(progress.state.step, "asked", number)
            found = place.link(AskedLink, name, {*false, *progress.state.ejected})
            if found is None:
                self.ask(progress)
                self._say_who_asked(progress, name)
                waits.sleep()
                continue
            number += 1
            try:
                progress = self._asked(progress, found)
            except FalseLinkError:
                false.append(found.author)
                continue
            if found.author is not None:
                asked = found.link.asked
        return progress, asked, false

    def _asked(self, progress: RunProgress, found: FoundLink) -> RunProgress:
        """Return a run after a link that says who takes part; as it was after anybody's bytes."""
        place, step = self.place, progress.state.step
        if found.author is None:
            return progress
        if found.link is None:
            raise FalseLinkError("has another form")
        joins = place.notices(step, "join", place.names(step))
        progress = links.check_asked(
            found.link, found.seen.seconds, place.head, progress, terms=place.terms, joins=joins
        )
        place.head = Head(hashlib.sha256(found.seen.content).hexdigest(), found.seen.seconds)
        return progress

    def ask(self, progress: RunProgress) -> None:
        """Ask to take part, if the volunteer may and has not."""
        me, step = self.volunteer, progress.state.step
        if me is None or not driver.may_ask(progress, [me.peer]):
            return
        request = JoinRequest(
            run=self.place.run, round=step, peer=me.peer, environment=me.environment, self_test=None
        )
        name = slots.of_peer(step, me.peer, "join")
        if self.place.look(name, slots.JOIN_BYTES) is None:
            self.place.put(name, sign(request, me.key, slots.JOIN_BYTES))

    def _say_who_asked(self, progress: RunProgress, name: str) -> None:
        """Put the link that says who asked, if they are enough."""
        me, place, step = self.volunteer, self.place, progress.state.step
        if me is None or me.peer in progress.state.ejected:
            return
        place.read_admissions()
        asked = driver.may_ask(progress, sorted(place.notices(step, "join", place.names(step))))
        if driver.ask(progress, asked).waiting:
            return
        if extra := place.terms.extra:  # seen after it was put, and both times are rounded down
            Waits(extra + 1).sleep()
        link = AskedLink(
            run=place.run, round=step, peer=me.peer, previous=place.head.sha256, asked=asked
        )
        place.put(name, sign(link, me.key, place.link_bytes))


class Settled(NamedTuple):
    """What a round came to by some messages."""

    progress: RunProgress
    taken: Taken
    params: str
    shared: str


@dataclass
class StoredRound:
    """A round in progress."""

    swarm: StoredSwarm
    progress: RunProgress
    begun: RoundBegun
    false: list[int]  # who signed links of it that were refused
    shown: dict[int, Counted | Refused] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)  # later than by the store's clock
    closable: float | None = None  # since when it could be closed
    worked: bool = False  # whether the volunteer has taken its step
    sent: bool = False  # whether its message is in the store
    left: bool = False  # whether it has said that it leaves

    def __post_init__(self) -> None:
        self.place, self.round = self.swarm.place, self.begun.round
        peers = self.swarm.peers
        self.before: tuple[Tree, Tree] = peers.params_and_shared()
        self.expected = Expected(
            self.place.run,
            self.round,
            peers.params_hash(),
            self.place.head.seconds,
            self.place.document.payload_bytes,
            peers.programs.form,
        )

    @property
    def me(self) -> Volunteer | None:
        """Who trains here, unless it was ejected."""
        me = self.swarm.volunteer
        return None if me is None or me.peer in self.progress.state.ejected else me

    def take(self) -> tuple[RunProgress, Taken]:
        """Take part in the round, if a volunteer lives here, and return what it came to."""
        self._work()
        number, waits = 0, Waits()
        while True:
            name = slots.link(self.round.step, "closed", number)
            silenced = {*self.false, *self.progress.state.ejected}
            found = self.place.link(RoundLink, name, silenced)
            if found is None:
                self._close(name)
                self._leave_if_asked()
                waits.sleep(at_once=not self.sent)
                continue
            number += 1
            if found.author is None:
                continue
            try:
                outcome = self._follow(found)
            except FalseLinkError:
                self.false.append(found.author)
                continue
            sha256 = hashlib.sha256(found.seen.content).hexdigest()
            self.place.head = Head(sha256, found.seen.seconds, found.link.asked)
            self._account(found.link)
            return outcome.progress, outcome.taken

    # ---- The volunteer's part ----

    def _work(self) -> None:
        """Take the volunteer's step and put its message, unless the round was closed without."""
        me, step = self.me, self.round.step
        if me is None:
            return
        if me.peer in self.round.joined:
            self.swarm.sits_out = False  # it begins with a new state
        if me.peer not in self.round.peers:
            self.swarm.ask(self.progress)
            return
        if self.swarm.sits_out or self._closed_without(me.peer):
            return
        done = self.swarm.work(self.round, self.progress.unready).done
        self.worked = True
        if me.peer not in done:  # nothing was assigned
            return
        sent, loss = done[me.peer].message, done[me.peer].loss
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
            environment=me.environment_hash,
            own=own,
        )
        if self.place.put(slots.of_peer(step, me.peer, "payload"), payload):
            name = slots.of_peer(step, me.peer, "record")
            self.sent = self.place.put(name, sign(record, me.key, slots.RECORD_BYTES))

    def _leave_if_asked(self) -> None:
        """Leave after its message, once this process is asked to stop; the round is still taken."""
        me, step = self.me, self.round.step
        if me is None or not self.sent or self.left or not signals.is_asked():
            return
        notice = LeaveNotice(run=self.place.run, round=step, peer=me.peer)
        name = slots.of_peer(step, me.peer, "leave")
        self.left = self.place.put(name, sign(notice, me.key, slots.LEAVE_BYTES))

    def _closed_without(self, peer: int) -> bool:
        """Return whether links are there already, and none has this peer's message."""
        number = 0
        while found := self.place.link(
            RoundLink, slots.link(self.round.step, "closed", number), set()
        ):
            if found.link is not None and peer in found.link.messages:
                return False
            number += 1
        return number > 0

    def _account(self, link: RoundLink) -> None:
        """Begin anew where others take the volunteer for silent, or for what it is not."""
        me = self.swarm.volunteer
        if me is None or me.peer not in self.round.assignment:
            return
        is_in = me.peer in link.messages
        self.swarm.sits_out |= is_in and not self.worked
        if not (is_in and self.worked):
            self.swarm.peers.restart(me.peer)

    # ---- What everybody computes ----

    def _read(self) -> set[str]:
        """Look at the records and payloads that are new; return the names of the round."""
        names = self.place.names(self.round.step)
        length = self.place.document.payload_bytes
        for peer in self.round.assignment:
            name, payload = (
                slots.of_peer(self.round.step, peer, what) for what in ("record", "payload")
            )
            before = self.shown.get(peer)
            is_known = before is not None and not links.may_change(before)
            if is_known or name not in names:
                continue
            record = self.place.look(name, slots.RECORD_BYTES)
            if record is None or not self._counts(record.seconds):
                continue
            key = self.place.admissions.key(peer, self.expected.began)
            bytes_ = self.place.look(payload, length) if payload in names else None
            one = judged(peer, record, bytes_, key, self.expected)
            if one is not None:
                self.shown[peer] = one
        return names

    def _counts(self, seconds: int) -> bool:
        return self.place.terms.counts(seconds - self.expected.began)

    def _follow(self, found: FoundLink) -> Settled:
        """Return what the round came to by a link.

        Raises:
          FalseLinkError: It does not follow, and the params are as before it.
        """
        link: RoundLink = found.link
        if link is None:
            raise FalseLinkError("has another form")
        names = self._read()
        links.check_link(
            link,
            found.seen.seconds,
            self.place.head,
            self.round,
            self.shown,
            terms=self.place.terms,
            joins=self.place.notices(self.round.step, "join", names) if link.asked else (),
            leaves=self._leaves(names) if link.left else (),
            false_links=self.false,
        )
        outcome = self._settle([*link.messages], link.left)
        try:
            applied, after = outcome.taken.entry.decision.applied, outcome.progress
            links.check_outcome(link, applied, outcome.params, outcome.shared, after)
        except FalseLinkError:
            self._undo()
            raise
        return outcome

    def _leaves(self, names: set[str]) -> set[int]:
        state = self.progress.state
        there = state.healthy_members.union(state.pending)
        return self.place.notices(self.round.step, "leave", names) & there

    def _settle(self, senders: list[int], left: tuple[int, ...]) -> Settled:
        """Settle the round by the messages of some senders."""
        self._undo()
        counted: dict[int, Counted] = {p: self.shown[p] for p in sorted(senders)}
        sent = {peer: one.sent for peer, one in counted.items()}
        whole = {p: one.sent for p, one in counted.items() if not one.broken}
        beyond = bound.beyond({peer: one.largest for peer, one in whole.items()})
        received = {p: one.message for p, one in whole.items() if p not in beyond}
        arrivals = {peer: float(one.seconds) for peer, one in counted.items()}
        delivered = Delivered(sent, {}, {}, received, arrivals)
        worked = self._said(counted)
        evidence = replace(evidence_of(worked, delivered), false_links=tuple(sorted({*self.false})))
        kept = self.swarm.kept(delivered, evidence, self.round)
        own = {p: one.body.own for p, one in counted.items() if one.body.own is not None}
        exchanged = Exchanged(evidence, received, worked.loss, left, *kept, own)
        progress, taken = self.swarm.settle(self.progress, self.begun, exchanged)
        shared = tree_hash(jax.device_get(self.swarm.peers.shared))
        return Settled(progress, taken, self.swarm.peers.params_hash(), shared)

    def _said(self, counted: Mapping[int, Counted]) -> Worked:
        """Return what the senders say that they did."""
        done = {p: Done(one.sent, one.body.loss) for p, one in counted.items()}
        losses = [one.loss for one in done.values() if one.loss is not None]
        silent = tuple(sorted(self.round.assignment.keys() - counted.keys()))
        return Worked({}, done, float(np.mean(losses)) if losses else None, silent)

    def _undo(self) -> None:
        """Have all agree again on what they did before the round."""
        params, shared = self.before
        if self.swarm.peers.programs.merges_in_parts:  # which takes the memory of what is shared
            shared = jax.tree.map(jnp.copy, shared)
        self.swarm.peers.agree(params, shared)

    # ---- Closing a round ----

    def _close(self, name: str) -> None:
        """Put the link that closes the round, if it may come and it is the volunteer's turn."""
        me, terms = self.me, self.place.terms
        if me is None:
            return
        now = time.monotonic()
        late = links.turn(self.round, me.peer) * self.place.stagger
        if now - self.began < late:
            return
        # since the link before was put it is longer, and both times are rounded down
        over = terms.is_over(int(now - self.began) - 1)
        names = self._read()
        if not over and not links.is_whole(self.round, self.shown):
            return
        self.closable = self.closable or now
        if now - self.closable < late:
            return
        self.place.read_admissions()
        left = tuple(sorted(self._leaves(names)))
        joins = sorted(self.place.notices(self.round.step, "join", names))
        messages, rejected = links.linked(self.shown)
        outcome = self._settle([*messages], left)
        link = RoundLink(
            run=self.place.run,
            round=self.round.step,
            peer=me.peer,
            previous=self.place.head.sha256,
            asked=driver.may_ask(outcome.progress, joins),
            left=left,
            messages=messages,
            rejected=rejected,
            false_links=tuple(sorted({*self.false})),
            applied=outcome.taken.entry.decision.applied,
            params=outcome.params,
            shared=outcome.shared,
        )
        self.place.put(name, sign(link, me.key, self.place.link_bytes))
