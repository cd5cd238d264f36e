"""A run in a store, as a process of it sees it: what belongs to whom, and the newest link."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lockstep.errors import LockstepError, RequestError
from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.windows import Snapshots
from parts.volunteers import slots
from parts.volunteers.audits.draws import AuditDraws
from parts.volunteers.bodies import JoinRequest, LeaveNotice, MessageRecord, RunDocument, ShownState
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.links import AskedLink, Head, RoundLink, Terms
from parts.volunteers.chain.signed_rounds import SignedRounds
from parts.volunteers.collecting import collected
from parts.volunteers.keys import PrivateKey, PublicKey, public_text
from parts.volunteers.signed import Body, opened
from parts.volunteers.store.verbs import AwaitedError, MissedError, Store, StoredObject
from pipeline.net.limits import UnreachableError
from pipeline.stage import signals

if TYPE_CHECKING:
    from parts.volunteers.audits.showing import Showing

# What is signed of what a peer puts in a round, and its length; of a link, that of the run.
SIGNED: dict[str, tuple[type[Body], int | None]] = {
    "record": (MessageRecord, slots.RECORD_BYTES),
    "join": (JoinRequest, slots.JOIN_BYTES),
    "leave": (LeaveNotice, slots.LEAVE_BYTES),
    "shown": (ShownState, slots.SHOWN_BYTES),
    "closed": (RoundLink, None),
    "asked": (AskedLink, None),
}
NOTICES = "join", "leave"
log = logging.getLogger(__name__)

LONGEST = 5.0  # seconds between two looks at a store, at most
Got = TypeVar("Got")
MOST_LISTED = 10**6  # names of all rounds


class CaughtUp(Exception):  # noqa: N818 - no error
    """All links of a run were followed that are there, or that can be."""


class ChainEnd(NamedTuple):
    """Where the links end that follow."""

    step: int  #: The round that is not over.
    wrong: list[str]  #: Why no link of it can ever follow.
    refused: list[str]  #: Links that do not follow, and on which nobody built.
    beyond: list[str]  #: Names of what was signed in later rounds.


@dataclass
class Onlooker:
    """How somebody follows a run who only looks on.

    waits: For links to come; else CaughtUp is raised.
    say: Gets a line a round.
    place: What was followed, once it is.
    end: Where it caught up; None at the run's end.
    """

    waits: bool
    say: Callable[[str], object]
    place: "RunInStore | None" = None
    end: ChainEnd | None = None


class Waits:
    """Waits between two looks at a store, each longer than the one before, in seconds."""

    def __init__(self, first: float = 0.05):
        self.next = first

    def sleep(self, *, at_once: bool = True) -> None:
        """Wait; a request to stop this process is obeyed at once, or not."""
        with signals.at_once() if at_once else nullcontext():
            time.sleep(self.next)
        self.next = min(1.5 * self.next, LONGEST)


class Volunteer(NamedTuple):
    """Who trains here."""

    peer: int
    key: PrivateKey
    environment: dict[str, str]


@dataclass
class LinkInSlot:
    """What stands in a slot: a link, a record or a notice.

    link: What it says; None unless the slot's peer signed it for this slot.
    """

    stored: StoredObject
    link: Any = None

    @property
    def sha256(self) -> str:
        """SHA-256 of its bytes, hex."""
        return hashlib.sha256(self.stored.content or b"").hexdigest()


@dataclass
class RunInStore(Observer):
    """A run in a store, and the newest link of its chain that this process has followed."""

    store: Store
    document: RunDocument
    run: str  # SHA-256 of run.json, hex
    admissions: Admissions
    terms: Terms
    head: Head
    snapshots: Snapshots
    draws: AuditDraws
    audit_seconds: int  # in which a drawn peer puts its own states
    watch: Onlooker | None = None
    shows: "Showing | None" = None  # where a volunteer lives here
    signed: SignedRounds | None = None  # where what is signed is kept
    _read: dict[str, int] = field(default_factory=dict)  # notices, and when each was put

    def saves(self) -> dict[str, Any]:
        """Return the head and the draws, for a checkpoint."""
        head = self.head
        chain = [head.sha256, head.seconds, [*head.asked], [*head.owed]]
        return {"chain": chain, "audits": self.draws.to_json()}

    def restore(self, extras: dict[str, Any] | None) -> None:
        """Go on from the head in a checkpoint, if there is one."""
        if extras:
            sha256, seconds, asked, owed = extras["chain"]
            self.head = Head(sha256, seconds, tuple(asked), tuple(owed))
            self.draws.restore(extras["audits"])

    def followed(self, link: RoundLink, began: int) -> None:
        """Keep what is signed of a round, which began at that time; draw audits after a window."""
        if self.signed is not None:
            self.signed.keep(link, self.head.sha256, self.admissions.objects)
        keys = {peer: self.admissions.key(peer, began) for peer in link.messages}
        self.draws.took({peer: public_text(key) for peer, key in keys.items() if key})
        if not self.snapshots.keeps(link.round):
            return
        windows = self.snapshots.windows
        number = next(n for n, window in enumerate(windows) if window.last == link.round)
        head = self.head
        drawn = self.draws.close(number, windows[number], head.sha256, link.peer, head.seconds)
        self.say(f"window {number}: drawn for an audit: peers {[draw.peer for draw in drawn]}")

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Show what the volunteer here owned, where it was drawn lately."""
        if self.shows is None:
            return
        for draw in self.draws.drawn:
            if self.head.seconds <= draw.seconds + self.audit_seconds:
                self.shows.begin(draw)
        if entry.round.step == self.snapshots.end:
            self.shows.wait()

    @property
    def link_bytes(self) -> int:
        """The length of a link."""
        return slots.link_bytes(self.document.slots)

    def say(self, text: str) -> None:
        """Tell an onlooker what came of a round."""
        if self.watch is not None:
            self.watch.say(text)

    @property
    def looks_once(self) -> bool:
        """Whether nobody waits here for links to come."""
        return self.watch is not None and not self.watch.waits

    def check_payloads(self, step: int) -> None:
        """Check that a round's payloads were not removed by the lab.

        Raises:
          RequestError: They were, so nobody can follow it any more.
        """
        last = collected(self.store, self.run, self.admissions.lab)
        if step <= last:
            raise RequestError(
                f"{self.store.address}: rounds {step} to {last} can no longer be proven, since the "
                "lab removed their payloads; expected a follower that has read them already"
            )

    # ---- The verbs, for as long as it takes the store to answer ----

    def look(self, name: str, most: int) -> StoredObject | None:
        """Look at an object."""
        stored = self._patiently(lambda: self.store.look(name, most))
        if self.signed is not None:
            self.signed.saw(name, stored)
        return stored

    def put(self, name: str, content: bytes) -> bool:
        """Put an object under a free name; return whether these bytes stand there now.

        Where the lab signed no address yet, this waits for one. It is too late, and the bytes are
        not there, once the lab signed for later rounds alone.
        """
        try:
            return self._patiently(lambda: self.store.create(name, content))
        except MissedError:
            return False

    def names(self, step: int) -> dict[str, int]:
        """List the objects of a round, each with its time in seconds.

        If the store refuses, or has too many names, the list has all names that peers can put in
        the round, with time 0: some of them may not exist.
        """
        try:
            return self._patiently(lambda: self.store.names(slots.round_folder(step)))
        except LockstepError:
            peers = range(self.document.slots)
            return {slots.of_peer(step, p, what): 0 for p in peers for what in slots.KINDS}

    def later_names(self, step: int) -> Iterable[str]:
        """Return the names of rounds from `step` on; of a store that cannot be listed, of two."""
        if self.looks_once:
            with suppress(LockstepError):
                names = self._patiently(lambda: self.store.names(slots.ROUNDS, MOST_LISTED))
                return [name for name in names if name >= slots.round_folder(step)]
        return [*self.names(step), *self.names(step + 1)]

    def _patiently(self, ask: Callable[[], Got]) -> Got:
        waits, warned = Waits(), False
        while True:
            try:
                return ask()
            except UnreachableError as error:  # it may stop for a while
                if isinstance(error, AwaitedError) and not warned:
                    log.warning(f"train: waits until the lab signs more: {error}")
                    warned = True
                waits.sleep()

    # ---- What people signed ----

    def read_admissions(self) -> None:
        """Learn who was admitted meanwhile."""
        self._patiently(self.admissions.read)

    def notices(
        self, step: int, what: str, names: Iterable[str], at: int | None = None
    ) -> dict[int, int]:
        """Return who asked to take part in a round ("join"), or left ("leave"), and when.

        `names` are the names of the round that may be there; `at` means the same as in `link`.
        """
        of_peers = slots.names_by_peer(names, what)
        for name in of_peers.values():
            entry = None if name in self._read else self.signed_in(name, at)
            if entry is not None and entry.link is not None:
                self._read[name] = entry.stored.seconds
        return {p: self._read[name] for p, name in of_peers.items() if name in self._read}

    def signed_in(self, name: str, at: int | None = None) -> LinkInSlot | None:
        """Return what stands in a slot of a round, one of `SIGNED`; None where nothing does yet.

        The signer must have had the slot at the time `at` of the store's clock or, if `at` is None,
        when it was put. What is signed for another slot shows nothing about its signer: anybody who
        may write here can have copied it.
        """
        step, what, peer = slots.slot(name) or slots.RoundSlot(0, "closed", 0)
        model, length = SIGNED[what]
        stored = self.look(name, length := length or self.link_bytes)
        if stored is None:
            return None
        key = self._key(peer, stored, at)
        if key is not None:
            with suppress(LockstepError):
                body: Any = opened(model, stored.content, key, name, length)
                if (body.run, body.round, body.peer) == (self.run, step, peer):
                    return LinkInSlot(stored, body)
        return LinkInSlot(stored)

    def _key(self, peer: int, stored: StoredObject, at: int | None) -> PublicKey | None:
        """Return who had a slot when an object was put, or `at` a time before the round."""
        if at is None:
            self.read_admissions()
        return self.admissions.key(peer, stored.seconds if at is None else at)
