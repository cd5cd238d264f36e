"""The loop that waits for a round's link, or puts one, as `act` says; links that begin a round."""

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from parts.volunteers import layout
from parts.volunteers.chain import links
from parts.volunteers.chain.act import Adopt, End, Look, Put, RoundRead, Wait, act
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Head
from parts.volunteers.store.patient_store import Waits
from parts.volunteers.training.process import Process

CameTo = TypeVar("CameTo")


class RoundLinks(Generic[CameTo]):
    """The links of a round here, one of which will count.

    A subclass has four methods. `look(now)` reads what is new: where it is likely or, if the
    reading is `everywhere`, all. `follow(peer)` returns what the round came to by a peer's link,
    or raises a FalseLinkError. `link(notices)` returns the volunteer's link, which names what
    these say. `wait(waits)` waits a while, and puts what the volunteer has to say meanwhile.
    """

    seldom = 4  #: One of so many looks goes into all slots.

    def __init__(self, process: Process, read: RoundRead, at: int | None):
        self.process, self.chain, self.read = process, process.chain, read
        #: When a peer must have had its slot, by the store's clock; None: when it put its link.
        self.at = at

    def look_before(self) -> CameTo | None:
        """Look again at links of the round before; return what it came to, if another closed it."""
        return None

    def put(self, notices: Collection[str], waits: Waits) -> None:
        """Put the volunteer's link of a round."""
        self.process.put(body := self.link(notices))
        self.read_slots([body.peer])
        if body.peer not in self.read.links:  # it is too late for one
            self.wait(waits)

    def read_slots(self, peers: Iterable[int]) -> None:
        """Look into the slots of some peers, as far as nothing was found there before."""
        for peer in peers:
            if peer in self.read.links:
                continue
            name = layout.of_peer(self.read.step, peer, self.read.what)
            content = self.chain.content(name, self.at)
            if content is not None:
                self.read.links[peer] = replace(content, seen=time.monotonic())

    def list(self) -> dict[str, int]:
        """Look for links into all slots; return the names of the round, and when each was put."""
        read = self.read
        read.listed, now = self.chain.names(read.step), time.monotonic()
        read.first_listed = dict.fromkeys(read.listed, now) | read.first_listed
        self.read_slots(layout.names_by_peer(read.listed, read.what))
        return read.listed

    def look_beyond(self) -> None:
        """Read links that peers signed later, for who does not train, and may wait in vain."""
        read, self.read.beyond = self.read, None
        if self.process.volunteer is None and read.first() is None:
            in_all = self.process.looks_once
            read.beyond = [*self.chain.signed_later(read.step, read.what, in_all=in_all)]
            if read.beyond and read.went_on is None:
                read.went_on = time.monotonic()


def adopt(links: RoundLinks[CameTo], first_wait: float = 0.0) -> CameTo | End:
    """Return what a round came to by the link that counts, or where the links end."""
    read, waits, number = links.read, Waits(first_wait), 1
    once = links.process.looks_once
    read.everywhere = number % links.seldom == 0 or once
    while True:
        now = time.monotonic()
        if read.everywhere and read.signed(read.ejected):
            # before the slots, in which so all is that is older
            read.next_round = max(links.chain.names(read.step + 1).values(), default=0)
        links.look(now)
        action = act(read, now)
        is_stuck = isinstance(action, Wait | End) and read.everywhere
        if is_stuck and (read.signed(read.ejected) or read.refused):
            links.chain.check_payloads(read.step)
        match action:
            case Adopt(peer):
                try:
                    return links.follow(peer)
                except FalseLinkError as error:
                    read.refused[peer] = str(error)
            case Look(before=True):
                read.doubted |= read.doubts()
                if (outcome := links.look_before()) is not None:
                    return outcome
            case Look():
                read.everywhere = True
            case Put(notices):
                links.put(notices, waits)
            case End():
                return action
            case Wait():
                links.wait(waits)
                number += 1
                read.everywhere = number % links.seldom == 0 or once


Began = tuple[RunProgress, tuple[int, ...]]
"""The run with those that take part, and who they are."""


class BeginningLinks(RoundLinks[Began]):
    """The links with which a round begins, of a run that waits for members."""

    seldom = 1

    def __init__(self, process: Process, progress: RunProgress):
        super().__init__(process, process.read(progress, "asked"), None)
        self.progress, self.joins = progress, dict[int, int]()

    def look(self, now: float) -> None:
        """Look at the links of who asked, and into all slots."""
        read, chain = self.read, self.chain
        self.joins = chain.notices(self.list(), "join")
        slots, terms = chain.document.slots, chain.terms
        read.turns = links.turns_to_begin(self.progress, self.joins, read.head, terms, slots)
        if read.turns is not None and read.begun is None:
            # more time has passed since enough had asked, and since the link before
            read.begun = now + max(1.0, terms.extra) + 1
        self.look_beyond()

    def follow(self, peer: int) -> Began:
        """Return the run with those that a beginning link lists."""
        content, order, head = self.read.links[peer], self.read.turns, self.read.head
        assert order is not None
        times = content.stored.seconds, order.since
        before, must = (links.put_before(seconds, self.joins) for seconds in times)
        progress = links.check_asked(content.body, head, self.progress, before, must)
        owed = tuple(sorted({*head.owed, *self.read.refused}))
        self.chain.head = Head(content.sha256, content.stored.seconds, owed=owed)
        return progress, content.body.asked

    def link(self, notices: Collection[str]) -> AskedLink:
        """Return the volunteer's beginning link, which lists all that asked before its turn."""
        read, me, order = self.read, self.read.me, self.read.turns
        assert me is not None and order is not None
        begins = order.since + int(order.delay(me))  # so the link is put later
        asked = driver.may_ask(self.progress, links.put_before(begins, self.joins))
        previous = read.head.sha256
        return AskedLink(
            run=self.chain.run, round=read.step, peer=me, previous=previous, asked=asked
        )

    def wait(self, waits: Waits) -> None:
        """Ask to take part, and wait for the links that begin a round."""
        self.process.ask(self.progress)
        waits.sleep()
