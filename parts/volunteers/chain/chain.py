"""The chain of a run's links, as far as a process has followed it, and what peers sign."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lockstep.errors import LockstepError, RequestError
from lockstep.protocol.attestation import Hash
from lockstep.transcript.windows import Snapshots, Window
from parts.volunteers import layout
from parts.volunteers.bodies import (
    JoinRequest,
    LeaveNotice,
    MessageRecord,
    RunDocument,
    ShownState,
    SlotBody,
)
from parts.volunteers.chain.draws import AuditDraws
from parts.volunteers.chain.links import AskedLink, Head, RoundLink, SlotContent, Terms
from parts.volunteers.chain.signed_rounds import SignedRounds
from parts.volunteers.chain.statements import Admissions, collected_notices
from parts.volunteers.keys import public_text
from parts.volunteers.signed import opened
from parts.volunteers.store.patient_store import PatientStore
from parts.volunteers.store.verbs import StoredObject

BODIES = MessageRecord, JoinRequest, LeaveNotice, ShownState, RoundLink, AskedLink
SIGNED: dict[str, type[SlotBody]] = {body.slot: body for body in BODIES}
MOST_LISTED = 10**6  # names of all rounds
MOST_LATER = 1024  # names of later rounds that are looked at


@dataclass
class Chain:
    """A run's links, up to the newest that this process has followed.

    Attributes:
      store: The run's.
      document: What the lab signed of the run.
      admissions: Who has which slot.
      terms: When a link may come.
      snapshots: After which rounds windows end.
      draws: Which windows are audited, by the links so far.
      head: The newest link.
      signed: Keeps what people signed; None where nobody asks for it.
    """

    store: PatientStore
    document: RunDocument
    admissions: Admissions
    terms: Terms
    snapshots: Snapshots
    draws: AuditDraws
    head: Head
    signed: SignedRounds | None = None
    _noticed: dict[str, int] = field(default_factory=dict)  # when each was put, by name

    @property
    def run(self) -> Hash:
        """The chain's run: SHA-256 of run.json, hex."""
        return self.admissions.run

    @property
    def min_clients(self) -> int:
        """How many peers of the chain's run are too many to collude."""
        return self.document.run["config"]["min_clients"]

    @cached_property
    def _windows(self) -> dict[int, tuple[int, Window]]:
        """The chain's windows with their numbers, by the round that ends each."""
        return {window.last: (n, window) for n, window in enumerate(self.snapshots.windows)}

    # ---- What was followed ----

    def to_json(self) -> dict[str, Any]:
        """Return the chain's head and draws, for a checkpoint."""
        head = self.head
        chain = [head.sha256, head.seconds, [*head.asked], [*head.owed]]
        return {"chain": chain, "audits": self.draws.to_json()}

    def restore(self, extras: dict[str, Any] | None) -> None:
        """Go on from the chain's head in a checkpoint, if there is one."""
        if extras:
            sha256, seconds, asked, owed = extras["chain"]
            self.head = Head(sha256, seconds, tuple(asked), tuple(owed))
            self.draws.restore(extras["audits"])

    def follow(self, link: RoundLink, head: Head, began: int) -> str | None:
        """Go on from the link that closed a round, the chain's new head; draw after a window.

        `began` is when the round did. Return what was drawn; None within a window.
        """
        self.head = head
        if self.signed is not None:
            self.signed.keep(link, head.sha256, self.admissions.objects)
        keys = {peer: self.admissions.key(peer, began) for peer in link.messages}
        self.draws.took({peer: public_text(key) for peer, key in keys.items() if key})
        if link.round not in self._windows:
            return None
        number, window = self._windows[link.round]
        drawn = self.draws.close(number, window, head.sha256, link.peer, head.seconds)
        return f"window {number}: drawn for an audit: peers {[draw.peer for draw in drawn]}"

    # ---- What lies in a round ----

    def look(self, name: str, most: int) -> StoredObject | None:
        """Look at an object in the store of the chain."""
        stored = self.store.look(name, most)
        if self.signed is not None:
            self.signed.saw(name, stored)
        return stored

    def names(self, step: int) -> dict[str, int]:
        """List the objects of a round of the chain, each with its time in seconds.

        If the store refuses, or has too many names, the list has all names that peers can put in
        the round, with time 0: some of them may not exist.
        """
        try:
            return self.store.names(layout.round_folder(step))
        except LockstepError:
            peers = range(self.document.slots)
            return {layout.of_peer(step, p, what): 0 for p in peers for what in layout.KINDS}

    def content(self, name: str, at: int | None = None) -> SlotContent | None:
        """Return what is in a slot of a round, one of `SIGNED`; None where nothing is yet.

        The signer must have had the slot at the time `at` of the store's clock or, if `at` is None,
        when it was put. What is signed for another slot shows nothing about its signer: anybody who
        may write here can have copied it.
        """
        step, what, peer = layout.parse(name) or layout.RoundObject(0, "closed", 0)
        length = layout.signed_bytes(what, self.document.slots)
        stored = self.look(name, length)
        if stored is None:
            return None
        if at is None:
            self.read_admissions()
        key = self.admissions.key(peer, stored.seconds if at is None else at)
        if key is not None:
            with suppress(LockstepError):
                body = opened(SIGNED[what], stored.content, key, name, length)
                if body.place == (self.run, step, peer):
                    return SlotContent(stored, body)
        return SlotContent(stored)

    def notices(self, names: Iterable[str], what: str, at: int | None = None) -> dict[int, int]:
        """Return when each peer put its notice, "join" or "leave", in a round of the chain.

        `at` means the same as in `content`.
        """
        of_peers = layout.names_by_peer(names, what)
        for name in of_peers.values():
            content = None if name in self._noticed else self.content(name, at)
            if content is not None and content.body is not None:
                self._noticed[name] = content.stored.seconds
        return {p: self._noticed[name] for p, name in of_peers.items() if name in self._noticed}

    def read_admissions(self) -> None:
        """Learn who was admitted to the chain's run meanwhile."""
        self.store.patiently(self.admissions.read)

    def signed_links(
        self, step: int, what: str, at: int | None, ejected: Collection[int] = ()
    ) -> dict[int, SlotContent]:
        """Return the chain's links of a round, "closed" or "asked", signed by the slots' peers."""
        names = layout.names_by_peer(self.names(step), what).items()
        contents = {p: self.content(name, at) for p, name in names if p not in ejected}
        return {p: content for p, content in contents.items() if content and content.body}

    def signed_later(
        self, step: int, what: str, *, in_all: bool
    ) -> Iterator[tuple[str, SlotContent]]:
        """Yield what peers signed that comes in the chain after a link, "closed" or "asked".

        It looks into all later rounds, if the store can be listed, or else into two.
        """
        kinds, this = ("record", "closed", "asked"), (step, what)
        names = self._later_names(step + (what == "closed"), in_all=in_all)
        found = {name: layout.parse(name) for name in names}
        later = [n for n, one in found.items() if one and one.what in kinds and one[:2] != this]
        for name in sorted(later)[:MOST_LATER]:
            content = self.content(name)
            if content is not None and content.body is not None:
                yield name, content

    def _later_names(self, step: int, *, in_all: bool) -> Iterable[str]:
        if in_all:
            with suppress(LockstepError):
                names = self.store.names(layout.ROUNDS, MOST_LISTED)
                return [name for name in names if name >= layout.round_folder(step)]
        return [*self.names(step), *self.names(step + 1)]

    def check_payloads(self, step: int) -> None:
        """Check that the lab did not remove the payloads of the chain's round.

        Raises:
          RequestError: They were, so nobody can follow it any more.
        """
        notices = collected_notices(self.store, self.run, self.admissions.lab)
        if step <= (last := max((notice.round for notice in notices), default=0)):
            raise RequestError(
                f"{self.store.address}: rounds {step} to {last} can no longer be proven, since the "
                "lab removed their payloads; expected a follower that has read them already"
            )
