"""A run in a store, as a process of it sees it: whose bytes are what, and the newest link."""

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import LockstepError
from lockstep.transcript.observer import Observer
from parts.volunteers import slots
from parts.volunteers.bodies import JoinRequest, LeaveNotice, RunDocument
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.links import AskedLink, Head, RoundLink, Terms
from parts.volunteers.keys import PrivateKey, PublicKey
from parts.volunteers.signed import canonical, is_signed, opened
from parts.volunteers.store.verbs import Seen, Store
from pipeline.net.limits import UnreachableError
from pipeline.stage import signals

NOTICES: dict[str, tuple[type[JoinRequest] | type[LeaveNotice], int]] = {
    "join": (JoinRequest, slots.JOIN_BYTES),
    "leave": (LeaveNotice, slots.LEAVE_BYTES),
}
LONGEST = 5.0  # seconds between two looks at a store, at most
Got = TypeVar("Got")
AnyLink = TypeVar("AnyLink", AskedLink, RoundLink)


class Waits:
    """Waits between two looks at a store, each longer than the one before, in seconds."""

    def __init__(self, first: float = 0.05, most: float = LONGEST):
        self.next, self.most = first, most

    def sleep(self, *, at_once: bool = True) -> None:
        """Wait; who asks this process to stop is obeyed at once, or not."""
        with signals.at_once() if at_once else nullcontext():
            time.sleep(self.next)
        self.next = min(1.5 * self.next, self.most)


class Volunteer(NamedTuple):
    """Who trains here."""

    peer: int
    key: PrivateKey
    environment: dict[str, str]

    @property
    def environment_hash(self) -> str:
        """SHA-256 of the environment, as records have it."""
        return hashlib.sha256(canonical(self.environment)).hexdigest()


@dataclass
class FoundLink:
    """What stands in a link's slot.

    is_signed: Whether the slot's peer signed it.
    link: What it says; None of what has another form, or is of another run or slot.
    """

    seen: Seen
    is_signed: bool = False
    link: Any = None

    @property
    def sha256(self) -> str:
        """SHA-256 of its bytes, hex."""
        return hashlib.sha256(self.seen.content or b"").hexdigest()


@dataclass
class RunInStore(Observer):
    """A run in a store, and the newest link of its chain that this process has followed."""

    store: Store
    document: RunDocument
    run: str  # SHA-256 of run.json, hex
    admissions: Admissions
    terms: Terms
    head: Head
    _read: dict[str, int] = field(default_factory=dict)  # notices, and when each was put

    def saves(self) -> dict[str, Any]:
        """Return the head, for a checkpoint."""
        head = self.head
        return {"chain": [head.sha256, head.seconds, [*head.asked], [*head.owed]]}

    def restore(self, rest: dict[str, Any] | None) -> None:
        """Go on from the head in a checkpoint, if there is one."""
        if rest:
            sha256, seconds, asked, owed = rest["chain"]
            self.head = Head(sha256, seconds, tuple(asked), tuple(owed))

    @property
    def link_bytes(self) -> int:
        """The length of a link."""
        return slots.link_bytes(self.document.slots)

    # ---- The verbs, for as long as it takes the store to answer ----

    def look(self, name: str, most: int) -> Seen | None:
        """Look at an object."""
        return self._patiently(lambda: self.store.look(name, most))

    def put(self, name: str, content: bytes) -> bool:
        """Put an object under a free name; return whether these bytes stand there now."""
        return self._patiently(lambda: self.store.create(name, content))

    def names(self, step: int) -> dict[str, int]:
        """Return when each object of a round was put, by its name.

        Of a listing that is refused or too long, it is all names that may be there, at time 0.
        """
        try:
            return self._patiently(lambda: self.store.names(slots.round_folder(step)))
        except LockstepError:
            count = range(self.document.slots)
            return {slots.of_peer(step, p, what): 0 for p in count for what in slots.KINDS}

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

    def notices(
        self, step: int, what: str, names: Iterable[str], at: int | None = None
    ) -> dict[int, int]:
        """Return who asked to take part in a round ("join"), or left ("leave"), and when.

        `names` are those of the round that may be there, `at` is as of `link`.
        """
        (model, length), of_peers = NOTICES[what], slots.of_kind(names, what)
        new = {p: self.look(name, length) for p, name in of_peers.items() if name not in self._read}
        for peer, seen in new.items():
            key, name = seen and self._key(peer, seen, at), of_peers[peer]
            if not (seen and key):
                continue
            with suppress(LockstepError):
                body = opened(model, seen.content, key, name, length)
                if (body.run, body.round, body.peer) == (self.run, step, peer):
                    self._read[name] = seen.seconds
        return {p: self._read[name] for p, name in of_peers.items() if name in self._read}

    def link(
        self, model: type[AnyLink], name: str, peer: int, at: int | None = None
    ) -> FoundLink | None:
        """Return what stands in a peer's slot for a link; None where nothing does yet.

        Who signs it must have had the slot `at` a time by the store's clock; without, when it was
        put.
        """
        seen = self.look(name, self.link_bytes)
        if seen is None:
            return None
        key = self._key(peer, seen, at)
        if key is None:
            return FoundLink(seen)
        try:
            body = opened(model, seen.content, key, name, self.link_bytes)
        except LockstepError:
            return FoundLink(seen, is_signed(model.kind, seen.content, key, name, self.link_bytes))
        return FoundLink(seen, True, body if (body.run, body.peer) == (self.run, peer) else None)

    def _key(self, peer: int, seen: Seen, at: int | None) -> PublicKey | None:
        """Return who had a slot when an object was put, or `at` a time before the round."""
        if at is None:
            self.read_admissions()
        return self.admissions.key(peer, seen.seconds if at is None else at)
