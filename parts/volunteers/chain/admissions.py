"""Who has which slot: what the lab has admitted, replaced and ended."""

from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import LockstepError
from parts.volunteers import slots
from parts.volunteers.bodies import Admission
from parts.volunteers.keys import PublicKey, parse_public, public_text
from parts.volunteers.signed import MOST_BYTES, opened
from parts.volunteers.store.verbs import ReadableStore, StoredObject
from pipeline.net.limits import UnreachableError

MOST_STATEMENTS = 1000  # of a slot


@dataclass
class Admissions:
    """A run's admissions, as far as the store was read.

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
        """Read what is new; a reader that may not list the store looks at each slot."""
        try:
            names = self.store.names(slots.ADMISSIONS, MOST_STATEMENTS * self.count)
        except UnreachableError:
            raise
        except LockstepError:
            names = None
        for peer in range(self.count):
            statements = self._statements.setdefault(peer, [])
            while names is None or slots.admission(peer, len(statements)) in names:
                statement = self._read(peer, len(statements))
                if statement is None:
                    break
                statements.append(statement)

    def slot_of(self, public: PublicKey) -> int:
        """Return the slot that somebody has, as far as the store was read.

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
        """Return how many statements there are on a slot."""
        return len(self._statements.get(peer, []))

    def newest(self, peer: int) -> PublicKey | None:
        """Return who has a slot, as far as the store was read."""
        statements = self._statements.get(peer)
        return statements[-1][1] if statements else None

    def key(self, peer: int, seconds: int) -> PublicKey | None:
        """Return the key that had a slot at a time of the store's clock; None if nobody had it.

        A statement holds from the next second on: others may have looked before, in its own.
        """
        holder = None
        for since, key in self._statements.get(peer, []):
            if since < seconds:
                holder = key
        return holder

    def _read(self, peer: int, number: int) -> tuple[int, PublicKey | None] | None:
        name = slots.admission(peer, number)
        stored = self.store.look(name, MOST_BYTES)
        with suppress(LockstepError):
            body = stored and opened(Admission, stored.content, self.lab, name)
            if stored and body and (body.run, body.peer, body.number) == (self.run, peer, number):
                key = None if body.key is None else parse_public(body.key, name)
                self.objects[name] = stored
                return stored.seconds, key
        return None
