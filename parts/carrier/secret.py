"""The keys of a run: the trainer's, and one for each process of each peer.

A process proves with CURVE that it has the key of its place, so that none can speak as another.
Files of keys are for their owner only.
"""

import os
from pathlib import Path
from typing import Annotated, TypeVar

import zmq
from pydantic import Field, ValidationError

from lockstep.errors import LockstepError
from lockstep.files import write_text
from lockstep.tables.table import AsTuple, Table

Z85 = Annotated[str, Field(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]
AnySecret = TypeVar("AnySecret", bound=Table)
Place = tuple[int, int]  # a peer, and which of its processes


class PeerSecret(Table):
    """Keys that the processes of one peer need."""

    peer: Annotated[int, Field(ge=0)]
    """Number of the peer."""
    server: Z85
    """The trainer's public key."""
    private: Annotated[tuple[Z85, ...], Field(min_length=1), AsTuple]
    """Private key of each of the peer's processes."""

    @classmethod
    def read(cls, path: Path) -> "PeerSecret":
        """Read the file of a peer's secret.

        Raises:
          LockstepError: The file has another form, or others may read it.
        """
        return _read(cls, path)


class TrainerSecret(Table):
    """Key that only the trainer has."""

    private: Z85
    """Its private key."""


class Secrets:
    """The keys of a run, in a folder: `trainer.json`, and `peer-N.json` for each of `count` peers.

    Each peer has `ranks` processes. Existing keys stay, since processes that were started by hand
    have them.

    Raises:
      LockstepError: A file is damaged, or others may read it.
    """

    def __init__(self, folder: Path, count: int, ranks: int = 1):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "trainer.json"
        given = _read(TrainerSecret, path) if path.exists() else None
        self.private = given.private if given else _new()
        self.public = public_of(self.private)
        self.places: dict[str, Place] = {}  # public key -> whose it is
        for peer in range(count):
            for rank, private in enumerate(self._peer(peer, ranks).private):
                self.places[public_of(private)] = peer, rank
        if given is None:  # the last one: who waits for it finds them all
            _write(path, TrainerSecret(private=self.private))

    def path(self, peer: int) -> Path:
        """Return the file of a peer."""
        return self.folder / f"peer-{peer}.json"

    def _peer(self, peer: int, ranks: int) -> PeerSecret:
        path = self.path(peer)
        if path.exists():
            there = PeerSecret.read(path)
            if (there.peer, there.server, len(there.private)) == (peer, self.public, ranks):
                return there
        new = PeerSecret(peer=peer, server=self.public, private=tuple(_new() for _ in range(ranks)))
        _write(path, new)
        return new


def public_of(private: str) -> str:
    """Return the public key of a private one."""
    return zmq.curve_public(private.encode()).decode()


def _new() -> str:
    return zmq.curve_keypair()[1].decode()


def _read(kind: type[AnySecret], path: Path) -> AnySecret:
    if path.stat().st_mode & 0o077:
        raise LockstepError(f"{path}: others may read it, expected mode 600: it is a secret")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "no JSON"
        raise LockstepError(f"{path}: {where}, expected the file of a run's secret") from None


def _write(path: Path, secret: Table) -> None:
    mask = os.umask(0o077)
    try:
        write_text(path, secret.model_dump_json() + "\n")
    finally:
        os.umask(mask)
