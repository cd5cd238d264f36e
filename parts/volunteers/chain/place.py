"""A run in a store, as a process of it sees it: whose bytes are what, and the newest link."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.errors import LockstepError
from lockstep.transcript.observer import Observer
from parts.volunteers import slots
from parts.volunteers.bodies import JoinRequest, LeaveNotice, RunDocument
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.links import AskedLink, Head, RoundLink, Terms
from parts.volunteers.chain.messages import author_of
from parts.volunteers.signed import is_signed, opened
from parts.volunteers.store.verbs import Seen, Store
from pipeline.net.limits import UnreachableError
from pipeline.stage import signals

NOTICES: dict[str, tuple[type[JoinRequest] | type[LeaveNotice], int]] = {
    "join": (JoinRequest, slots.JOIN_BYTES),
    "leave": (LeaveNotice, slots.LEAVE_BYTES),
}
Got = TypeVar("Got")
AnyLink = TypeVar("AnyLink", AskedLink, RoundLink)


class Waits:
    """Waits between two looks at a store, each longer than the one before, in seconds."""

    def __init__(self, first: float = 0.05, most: float = 5.0):
        self.next, self.most = first, most

    def sleep(self, *, at_once: bool = True) -> None:
        """Wait; who asks this process to stop is obeyed at once, or not."""
        with signals.at_once() if at_once else nullcontext():
            time.sleep(self.next)
        self.next = min(1.5 * self.next, self.most)


@dataclass
class FoundLink:
    """What stands in a link's slot.

    author: Who signed it; None of what nobody signed who may.
    link: What it says; None of what has another form.
    """

    seen: Seen
    author: int | None = None
    link: Any = None


@dataclass
class RunInStore(Observer):
    """A run in a store, and the newest link of its chain that this process has followed."""

    store: Store
    document: RunDocument
    run: str  # SHA-256 of run.json, hex
    admissions: Admissions
    terms: Terms
    stagger: float  # seconds between those who try to close a round
    head: Head

    def saves(self) -> dict[str, Any]:
        """Return the head, for a checkpoint."""
        return {"chain": [self.head.sha256, self.head.seconds, [*self.head.asked]]}

    def restore(self, rest: dict[str, Any] | None) -> None:
        """Go on from the head in a checkpoint, if there is one."""
        if rest:
            sha256, seconds, asked = rest["chain"]
            self.head = Head(sha256, seconds, tuple(asked))

    @property
    def link_bytes(self) -> int:
        """The length of a link."""
        return slots.link_bytes(self.document.slots)

    # ---- The verbs, for as long as it takes the store to answer ----

    def look(self, name: str, most: int) -> Seen | None:
        """Look at an object."""
        return self._patiently(lambda: self.store.look(name, most))

    def put(self, name: str, content: bytes) -> bool:
        """Put an object where there is none; return whether these bytes stand there now."""
        return self._patiently(lambda: self.store.create(name, content))

    def names(self, step: int) -> set[str]:
        """Return the names of a round that may be there: all, where a listing is too long."""
        try:
            return {*self._patiently(lambda: self.store.names(slots.round_folder(step)))}
        except LockstepError:
            kinds = "record", "payload", *NOTICES
            count = range(self.document.slots)
            return {slots.of_peer(step, peer, what) for peer in count for what in kinds}

    def _patiently(self, ask: Callable[[], Got]) -> Got:
        waits = Waits()
        while True:
            try:
                return ask()
            except UnreachableError:  # it may stop for a while
                waits.sleep()

    # ---- What people signed ----

    def read_admissions(self) -> None:
        """Learn who was admitted meanwhile."""
        self._patiently(self.admissions.read)

    def notices(self, step: int, what: str, names: set[str]) -> set[int]:
        """Return the peers that asked to take part in a round ("join"), or left ("leave")."""
        (model, length), found = NOTICES[what], set[int]()
        for slot, name in slots.known(names).items():
            seen = self.look(name, length) if slot.what == what else None
            key = seen and self.admissions.key(slot.number, seen.seconds)
            if not (seen and key):
                continue
            try:
                body = opened(model, seen.content, key, name, length)
            except LockstepError:
                continue
            if (body.run, body.round, body.peer) == (self.run, step, slot.number):
                found.add(slot.number)
        return found

    def link(self, model: type[AnyLink], name: str, silenced: set[int]) -> FoundLink | None:
        """Return what stands in a link's slot; None where nothing does yet.

        Of `silenced` peers nobody takes a link.
        """
        seen = self.look(name, self.link_bytes)
        if seen is None:
            return None
        author = author_of(seen.content)
        self.read_admissions()
        key = None if author is None else self.admissions.key(author, seen.seconds)
        if key is None or author in silenced:
            return FoundLink(seen)
        try:
            body = opened(model, seen.content, key, name, self.link_bytes)
        except LockstepError:
            is_theirs = is_signed(model.kind, seen.content, key, name, self.link_bytes)
            return FoundLink(seen, author if is_theirs else None)
        same = (body.run, body.peer) == (self.run, author)
        return FoundLink(seen, author, body if same else None)
