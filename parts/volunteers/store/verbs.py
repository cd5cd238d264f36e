"""The four verbs of a store, in which an object is put once and never changed.

Names are relative to the run's folder, with "/" between their parts. Times are the store's own, in
whole seconds since 1970, rounded down: a store may list an object's milliseconds and read out its
seconds.
"""

import hashlib
from typing import NamedTuple, Protocol

from lockstep.errors import LockstepError
from pipeline.net.limits import UnreachableError

MOST_NAMES = 4096  # of one listing: a round of 256 peers has a fifth of it


class StoredObject(NamedTuple):
    """What a store has under a name."""

    content: bytes | None  #: None: it is longer than was asked for.
    seconds: int  #: When it was put, by the store's clock.

    @property
    def sha256(self) -> str:
        """SHA-256 of a stored object's content, hex."""
        return hashlib.sha256(self.content or b"").hexdigest()


class AwaitedError(UnreachableError):
    """The store's lab has signed no address for this round yet: one may ask again later."""


class MissedError(LockstepError):
    """The store's lab signed addresses of later rounds, and none for this one: it is over."""


class ReadableStore(Protocol):
    """What a store shows of a run's folder."""

    address: str  #: Of the run's folder, without credentials.

    def look(self, name: str, most: int) -> StoredObject | None:
        """Return a stored object of up to `most` bytes, and its time; None if the name is free."""

    def names(self, prefix: str, most: int = MOST_NAMES) -> dict[str, int]:
        """Return when each stored object below a folder was put, by name; `prefix` ends in "/".

        Raises:
          LockstepError: there are more than `most`.
        """


class Store(ReadableStore, Protocol):
    """A run's folder in a store. Each verb is bounded in bytes and in time.

    Every verb raises UnreachableError where the store does not answer, so that one may ask again
    later, and LockstepError where it refuses.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Store an object under a free name, and return whether these bytes stand there now.

        So it is also true if an earlier process put them, or if an answer to this was lost.
        """

    def remove(self, name: str) -> None:
        """Remove an object from the store, if it is there: only for its owner."""


def too_many(where: str, most: int) -> str:
    """Return the error of a store's folder with more names than are read."""
    return f"{where}: over {most} names, expected at most that many"
