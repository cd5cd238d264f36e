"""What the lab signed: the run, who has which slot, and which rounds it removed the payloads of.

What it did not sign for a name is as if it was not there.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import LockstepError, RequestError
from lockstep.protocol.attestation import Hash
from parts.volunteers import layout
from parts.volunteers.bodies import Admission, CollectedNotice, RunDocument
from parts.volunteers.keys import PublicKey, parse_public, public_text
from parts.volunteers.signed import MOST_BYTES, AnyBody, opened, unsigned
from parts.volunteers.store.verbs import ReadableStore, StoredObject
from pipeline.net.limits import UnreachableError

MOST_STATEMENTS = 1000  # of a slot
MOST_NOTICES = 10**4


def read_run(
    store: ReadableStore, lab: PublicKey | None = None
) -> tuple[RunDocument, Hash, StoredObject]:
    """Return the lab's statement run.json, its hash, and the object in the store.

    Without the reader's `lab`, the lab's key is its own word.
    """
    stored = store.look(layout.RUN, MOST_BYTES)
    name = f"{store.address}/{layout.RUN}"
    if stored is None:
        raise RequestError(f"{name}: missing, expected a run that was opened")
    named = parse_public(unsigned(RunDocument, stored.content, name).lab, name)
    document = opened(RunDocument, stored.content, lab or named, name)
    if parse_public(document.lab, name) != (lab or named):
        raise LockstepError(f"{name}: lab is {document.lab}, expected the key that signed it")
    return document, stored.sha256, stored


@dataclass
class Admissions:
    """The lab's statements on who has which slot, as far as the store was read.

    What the lab did not sign for a name is as if it was not there. Whoever reads after it saw an
    object knows all that was admitted before that object.
    """

    store: ReadableStore
    run: str  # SHA-256 of run.json, hex
    lab: PublicKey
    count: int  # slots of the run
    objects: dict[str, StoredObject] = field(default_factory=dict)  # what was read, by name
    _statements: dict[int, list[tuple[int, PublicKey | None]]] = field(default_factory=dict)

    def read(self) -> None:
        """Read the lab's new statements; who may not list the store looks at each slot."""
        try:
            names = self.store.names(layout.ADMISSIONS, MOST_STATEMENTS * self.count)
        except UnreachableError:
            raise
        except LockstepError:
            names = None
        for peer in range(self.count):
            statements = self._statements.setdefault(peer, [])
            while names is None or layout.admission(peer, len(statements)) in names:
                statement = self._read(peer, len(statements))
                if statement is None:
                    break
                statements.append(statement)

    def slot_of(self, public: PublicKey) -> int:
        """Return the slot that the lab stated for somebody, as far as the store was read.

        Raises:
          LockstepError: the lab admitted no such key.
        """
        for peer in range(self.count):
            if self.newest(peer) == public:
                return peer
        raise LockstepError(
            f"{public_text(public)}: has no slot in {self.store.address}, expected a key "
            "that the lab has admitted"
        )

    def statements(self, peer: int) -> int:
        """Return how many statements of the lab there are on a slot."""
        return len(self._statements.get(peer, []))

    def newest(self, peer: int) -> PublicKey | None:
        """Return who has a slot by the lab's newest statement, as far as the store was read."""
        statements = self._statements.get(peer)
        return statements[-1][1] if statements else None

    def key(self, peer: int, seconds: int) -> PublicKey | None:
        """Return the key that by a statement had a slot at a time of the store's clock; else None.

        A statement holds from the next second on: others may have looked before, in its own.
        """
        holder = None
        for since, key in self._statements.get(peer, []):
            if since < seconds:
                holder = key
        return holder

    def _read(self, peer: int, number: int) -> tuple[int, PublicKey | None] | None:
        name = layout.admission(peer, number)
        stored = self.store.look(name, MOST_BYTES)
        place = {"run": self.run, "peer": peer, "number": number}
        with suppress(LockstepError):
            body = stated(Admission, stored, self.lab, name, place)
            if stored and body:
                key = None if body.key is None else parse_public(body.key, name)
                self.objects[name] = stored
                return stored.seconds, key
        return None


def collected_notices(store: ReadableStore, run: Hash, lab: PublicKey) -> Iterator[CollectedNotice]:
    """Yield the notices of the lab; what it did not sign for a name is as if it was not there."""
    for number in range(MOST_NOTICES):
        name, place = layout.collected(number), {"run": run, "number": number}
        notice = stated(CollectedNotice, store.look(name, MOST_BYTES), lab, name, place)
        if notice is None:
            return
        yield notice


def stated(
    model: type[AnyBody],
    stored: StoredObject | None,
    lab: PublicKey,
    name: str,
    place: Mapping[str, object],
) -> AnyBody | None:
    """Return the lab's statement for a name, where the body has the `place`; None for all else."""
    with suppress(LockstepError):
        body = stored and opened(model, stored.content, lab, name)
        if body and all(getattr(body, field) == value for field, value in place.items()):
            return body
    return None
