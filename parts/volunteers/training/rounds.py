"""Rounds over a store: those who live here train, and everybody follows what the store shows."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from lockstep.errors import LockstepError
from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.peers import SimulatedPeers
from lockstep.swarm.swarm import FinishedRound, RoundStart, Swarm
from lockstep.transcript.entry import Entry
from lockstep.wire.exchange import Asked
from parts.volunteers import layout
from parts.volunteers.chain import links
from parts.volunteers.chain.act import End
from parts.volunteers.chain.links import FalseLinkError, Head, RoundLink, SlotContent, Turns
from parts.volunteers.chain.payloads import Expected
from parts.volunteers.store.patient_store import Waits
from parts.volunteers.training.links import BeginningLinks, RoundLinks, adopt
from parts.volunteers.training.messages import OwnPart, RoundMessages, RoundResult, Settling
from parts.volunteers.training.process import Process
from parts.volunteers.training.states import States

FIRST_LOOK = 16  # the first look is after this part of what it waited in the round before
Taken = tuple[RunProgress, FinishedRound]


class StoredSwarm(Swarm):
    """A run's peers in rounds over a store. One of them lives here, or none.

    Attributes:
      process: The run, and who trains or looks on here.
      takes: Whether a snapshot is taken after a round.
      states: Where states are written.
      end: Where the links end; None as long as they were not followed so far, or to the last round.
    """

    peers: SimulatedPeers

    def __init__(
        self,
        process: Process,
        takes: Callable[[int], bool],
        states: States,
        *swarm: Any,
        **more: Any,
    ):
        super().__init__(*swarm, **more | {"recorded": Asked.BYTES})  # the store holds them
        self.process, self.takes, self.states = process, takes, states
        self.end: End | None = None
        self.waited = False  # whether the link before was not there yet when it was looked for
        self.waits = 0.0  # seconds that it waited for it
        self.last: ClosingLinks | None = None  # of the round before, until a link names its link

    def take_round(self, progress: RunProgress) -> tuple[RunProgress, FinishedRound | None]:
        """Follow the next round over the store, and train in it if a volunteer lives here.

        Where another link closed the round before after all, that round is returned once more; and
        None where an onlooker has come to the end of the links.
        """
        chain = self.process.chain
        askers = chain.head.asked
        progress, round_ = driver.next_round(driver.ask(progress, askers))
        if progress.waiting:
            began = adopt(BeginningLinks(self.process, progress))
            if isinstance(began, End):
                self._stop_at(began)
                return progress, None
            progress, asked = began
            askers = *askers, *asked
            progress, round_ = driver.next_round(progress)
        if round_ is None:
            return progress, None
        chain.read_admissions()
        start = RoundStart(round_, askers, self.join(round_))
        taken = ClosingLinks(self, progress, start).take()
        if isinstance(taken, End):
            self._stop_at(taken)
            return progress, None
        return taken

    def _stop_at(self, end: End) -> None:
        """Stop taking rounds where the links end.

        Raises:
          LockstepError: This is a training, which has to come to the last round, and never can.
        """
        if self.process.onlooker is None:
            raise LockstepError("; ".join(end.wrong))
        self.end = end


class ClosingLinks(RoundLinks[Taken]):
    """A round over a store in progress: its messages, and the links with which it closes."""

    def __init__(self, swarm: StoredSwarm, progress: RunProgress, start: RoundStart):
        process, chain, peers = swarm.process, swarm.process.chain, swarm.peers
        super().__init__(process, process.read(progress, "closed"), chain.head.seconds)
        self.swarm, self.progress, self.round = swarm, progress, start.round
        expected = Expected(
            chain.run,
            start.round,
            peers.params_hash(),
            chain.head.seconds,
            chain.document.payload_bytes,
            peers.programs.form,
            chain.terms.limit,
        )
        self.messages = RoundMessages(chain, expected)
        self.settling = Settling(swarm, swarm.states, progress, start)
        self.own = OwnPart(process, swarm, self.messages)
        last = swarm.last
        self.read.goes_back = last is not None and last.sha256 == chain.head.sha256
        self.draws = chain.draws.to_json()  # before the round
        self.began = time.monotonic()  # later than by the store's clock
        self.sha256 = ""  # of the link that closed it
        self.ended = Turns((), 0, 0.0)  # the turns to close it, and below who sent a message
        self.senders = set[int]()

    def take(self) -> Taken | End:
        """Take part in the round over the store, if a volunteer lives here; return its outcome."""
        commits_own = self.swarm.takes(self.round.step)
        self.own.work(self.progress, self._is_closed_without, commits_own=commits_own)
        self.own.leave_if_asked()
        self.swarm.waited, started = False, time.monotonic()
        taken = adopt(self, self.swarm.waits / FIRST_LOOK)
        self.swarm.waits = time.monotonic() - started
        return taken

    # ---- What the store shows ----

    def look(self, now: float) -> None:
        """Look for the link that closes the round over the store, and for messages.

        Who trains reads messages once its own link could be due.
        """
        read, messages, likely = self.read, self.messages, self._likely_turns()
        if read.everywhere:
            self.list()
        else:
            peer = next((p for p in likely.order if p not in read.links), None)
            if peer is not None and peer != read.me:
                self.read_slots([peer])
        # the link before was put earlier than that, and both times are rounded down
        is_over = self.chain.terms.is_over(int(now - self.began) - 1)
        if read.signed(read.ejected):
            messages.read_all(self.list)
        elif read.me is None or read.me in read.links:
            pass  # it has no link to put
        elif now - self.began >= likely.delay(read.me):
            if read.begun is None:
                messages.read_all(self.list) if is_over else messages.read()
            elif read.everywhere and is_over:
                messages.read(read.listed)
            if read.begun is None and (is_over or messages.whole):
                read.begun = now
        read.turns = self._turns()
        self.look_beyond()

    def _turns(self) -> Turns:
        """Return the turns to close the round over the store, by what was read of it."""
        head, terms, slots = self.read.head, self.chain.terms, self.chain.document.slots
        return links.turns_to_close(self.round, self.messages.shown, head, terms, slots)

    def _likely_turns(self) -> Turns:
        """Return the turns to close the round if all messages come, while nobody knows whether."""
        if self.read.begun is not None:
            return self._turns()
        members, all_slots = self.round.peers, range(self.chain.document.slots)
        order = links.in_order(self.round.seed, self.round.assignment, members, all_slots)
        return Turns(order, 0, self.chain.terms.turn)

    def _is_closed_without(self, peer: int) -> bool:
        """Return whether a link closed the round already, without this peer's message."""
        if self.swarm.waited:  # so the round has just begun
            return False
        self.list()
        if not self.read.signed(self.read.ejected):
            return False
        self.messages.read_all(self.list)
        self.read.turns = self._turns()
        return self.read.first() is not None and peer not in self.messages.shown

    def wait(self, waits: Waits) -> None:
        """Wait a while for the round to close; put the notice of leaving before any link."""
        self.swarm.waited = True
        waits.sleep(at_once=not self.own.is_sent)
        self.own.leave_if_asked()

    # ---- A link, and what follows from it ----

    def follow(self, peer: int) -> Taken:
        """Return what the round came to by a peer's closing link, and go on from it.

        Raises:
          FalseLinkError: It does not follow, and the params are as before it.
        """
        return self._go_on(self.read.links[peer], self._result(self.read.links[peer]))

    def look_before(self) -> Taken | None:
        """Look again at the round before over the store; return it if another link closed it."""
        last = self.swarm.last
        other = None if last is None else last.again()
        if other is None:
            self.settling.undo()
        else:
            self.process.sits_out |= self.own.worked  # its own state is a round ahead
        return other

    def again(self) -> Taken | None:
        """Look once more which link closed the round; return what it came to if it is another."""
        head, refused = self.read.head, self.read.refused
        self.read = replace(self.process.read(self.progress, "closed"), head=head)
        names, self.read.turns, self.read.refused = self.list(), self.ended, refused
        first = self.read.first()
        same = first is not None and self.read.links[first].sha256 == self.sha256
        if same and self.messages.senders(names) <= self.senders:
            return None  # nothing new, whatever somebody's link says
        self.read.refused = {}
        self.messages.read_all(self.list)
        self.read.turns = self._turns()
        while (peer := self.read.first()) is not None:
            content = self.read.links[peer]
            try:
                result = self._result(content)
            except FalseLinkError as error:
                self.read.refused[peer] = str(error)
                continue
            if content.sha256 == self.sha256:
                return None
            self.chain.draws.restore(self.draws)
            return self._go_on(content, result)
        return None

    def _result(self, content: SlotContent) -> RoundResult:
        link: RoundLink = content.body
        seconds = content.stored.seconds
        links.check_link(
            link,
            self.read.head,
            self.round,
            self.messages.shown,
            joins=self._noticed("join", link.asked, seconds),
            leaves=self._leaves(link.left, seconds),
            refused=self.read.refused,
        )
        shown = self.messages.shown
        result = self.settling.settle(shown, link.messages, link.left, link.false_links)
        try:
            applied, after = result.finished.entry.decision.applied, result.progress
            links.check_outcome(link, applied, result.hashes, after)
        except FalseLinkError:
            self.settling.undo()
            raise
        return result

    def _go_on(self, content: SlotContent, result: RoundResult) -> Taken:
        """Go on from the link that closed the round."""
        link, process, swarm = content.body, self.process, self.swarm
        named = {*link.false_links, *result.progress.state.ejected}
        owed = tuple(sorted({*self.read.refused} - named))
        head = Head(content.sha256, content.stored.seconds, link.asked, owed)
        me = process.volunteer
        swarm.states.closed(link, mine=me is not None and me.peer == link.peer)
        self.own.account(link, self.settling.undo)
        process.say(_line(link, result.finished.entry))
        if (drawn := self.chain.follow(link, head, self.messages.expected.began)) is not None:
            process.say(drawn)
        shown = self.messages.shown
        self.sha256, self.ended, self.senders = head.sha256, self._turns(), {*shown}
        shown.clear()  # with all messages
        swarm.last = self
        return result.progress, result.finished

    def _noticed(self, what: str, peers: Iterable[int], before: float) -> list[int]:
        """Return those of some peers that put a notice in the round before a time, ascending.

        A link that names a later one is false for ever, no matter who reads it when.
        """
        names = [layout.of_peer(self.round.step, peer, what) for peer in peers]
        return links.put_before(before, self.chain.notices(names, what, self.at))

    def _leaves(self, peers: Iterable[int], before: float) -> list[int]:
        state = self.progress.state
        able = state.healthy_members.union(state.pending)
        return self._noticed("leave", able.intersection(peers), before)

    def link(self, notices: Collection[str]) -> RoundLink:
        """Return the link that closes the round, by what was read of it."""
        self.swarm.waited, read, me = True, self.read, self.read.me
        assert me is not None
        joined = self._noticed("join", layout.names_by_peer(notices, "join"), math.inf)
        left = tuple(self._leaves(layout.names_by_peer(notices, "leave"), math.inf))
        messages, rejected = links.linked(self.messages.shown)
        refused = read.refused_before(time.monotonic())
        false_links = tuple(sorted({*refused, *read.head.owed}))
        result = self.settling.settle(self.messages.shown, messages, left, false_links)
        return RoundLink(
            run=self.chain.run,
            round=self.round.step,
            peer=me,
            previous=read.head.sha256,
            asked=driver.may_ask(result.progress, joined),
            left=left,
            messages=messages,
            rejected=rejected,
            false_links=false_links,
            applied=result.finished.entry.decision.applied,
            params=result.hashes[0],
            shared=result.hashes[1],
            state=result.hashes[2],
        )


def _line(link: RoundLink, entry: Entry) -> str:
    """Say what is proven of a round over a store, and what is stated."""
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
