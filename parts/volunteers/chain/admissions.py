"""Who has which slot: what the lab has admitted, replaced and ended."""

from dataclasses import dataclass, field

from lockstep.errors import LockstepError
from parts.volunteers import slots
from parts.volunteers.bodies import Admission
from parts.volunteers.keys import PublicKey, parse_public
from parts.volunteers.signed import MOST_BYTES, opened
from parts.volunteers.store.verbs import Store

FOLDER = "peers/"


@dataclass
class Admissions:
    """A run's admissions, as far as the store was read.

    Whoever reads after it saw an object knows all that was admitted before that object.
    """

    store: Store
    run: str  # SHA-256 of run.json, hex
    lab: PublicKey
    count: int  # slots of the run
    _found: dict[int, list[tuple[int, PublicKey | None]]] = field(default_factory=dict)

    def read(self) -> None:
        """Read what is new."""
        names = self.store.names(FOLDER, 1000 * self.count)
        for peer in range(self.count):
            known = self._found.setdefault(peer, [])
            while slots.admission(peer, len(known)) in names:
                known.append(self._read(peer, len(known)))

    def newest(self, peer: int) -> PublicKey | None:
        """Return who has a slot, as far as the store was read."""
        known = self._found.get(peer)
        return known[-1][1] if known else None

    def key(self, peer: int, seconds: int) -> PublicKey | None:
        """Return who had a slot at a time of the store; None of a slot that nobody had.

        A replacement holds from the next second on, as others may not have seen it before.
        """
        found = None
        for number, (since, key) in enumerate(self._found.get(peer, [])):
            if since < seconds + (number == 0):
                found = key
        return found

    def _read(self, peer: int, number: int) -> tuple[int, PublicKey | None]:
        name = slots.admission(peer, number)
        seen = self.store.look(name, MOST_BYTES)
        if seen is None:
            raise LockstepError(f"{self.store.address}/{name}: is gone, expected it to stay")
        found = opened(Admission, seen.content, self.lab, name)
        if (found.run, found.peer, found.number) != (self.run, peer, number):
            raise LockstepError(f"{name}: is of slot {found.peer}, number {found.number}")
        return seen.seconds, None if found.key is None else parse_public(found.key, name)
