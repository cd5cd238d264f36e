"""A record: the hash of what each operation of a part of a round gives, on one machine."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lockstep.errors import brief, expecting
from lockstep.files import read_bytes
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from parts.bits.by_operation import TakenOperation, recomputed
from parts.bits.opened import Arrays, on_host

MOST_BYTES, MOST_OPERATIONS, LONGEST = 2**26, 2**19, 400
BoundedText = Annotated[str, Field(max_length=LONGEST)]
PartOfRound = Literal["step", "merge", "loss", "weights"]


class Element(Table):
    """The first element in which an operation here differs from its rule."""

    result: int
    """Which result of the operation."""
    index: tuple[int, ...]
    """Its index."""
    found: tuple[BoundedText, BoundedText]
    """The value here, and its bits, hexadecimal."""
    right: tuple[BoundedText, BoundedText]
    """The value by the rule, and its bits."""


class OpenedOperation(Table):
    """An operation whose rule was computed again, in NumPy."""

    number: int
    """Its number among the operations."""
    shapes: Annotated[tuple[BoundedText, ...], Field(max_length=64)]
    """Types and shapes of its operands, and then of its results."""
    right: Hash
    """Hash of what the rule gives."""
    first: Element | None
    """The first element that differs from the rule; null where the results are right."""


class BitsRecord(Table):
    """The operations of a part of a round."""

    format: Literal[1] = 1
    """Version of the format."""
    key: Hash
    """SHA-256 of the tables of the run file that determine the rounds, and of the model."""
    of: PartOfRound
    """What was taken by its operations: a peer's step, the merge, a loss or the fresh weights."""
    round: int
    """The round."""
    peer: int
    """The peer, whose step and rows they are."""
    machine: Annotated[dict[BoundedText, BoundedText], Field(max_length=16)]
    """What computed it."""
    inputs: Annotated[dict[BoundedText, Hash], Field(max_length=16)]
    """Hash of what it was computed from, by name."""
    operations: Annotated[
        tuple[tuple[BoundedText, BoundedText, Hash], ...], Field(max_length=MOST_OPERATIONS)
    ]
    """Of each operation what it is, with types and a line of code; the loops that it is in, each
    with its iteration; and the hash of its results."""
    opened: OpenedOperation | None = None
    """The operation that was computed again."""

    @property
    def root(self) -> Hash:
        """The record's hash over those of all operations, for which it stands."""
        return hashlib.sha256(b"".join(bytes.fromhex(x) for *_, x in self.operations)).hexdigest()


def read(path: Path) -> BitsRecord:
    """Read a record, which may be a stranger's.

    Raises:
      LockstepError: It is larger than a record can be, or none.
    """
    with expecting(path, "a record of `lockstep bits`"):
        content = read_bytes(path, MOST_BYTES)
    return validate_json(BitsRecord, content, str(path))


class Recorder:
    """The operations of a record that were heard so far.

    The first that differs from another record is opened; of all others only the hash is computed.
    """

    def __init__(self, against: BitsRecord | None = None):
        self.theirs = against.operations if against else ()
        self.operations = list[tuple[str, str, Hash]]()
        self.opened: OpenedOperation | None = None

    def hear(self, taken: TakenOperation) -> None:
        """Keep an operation's hash in the record."""
        number, leaf = len(self.operations), taken.hash
        self.operations.append((brief(taken.name, LONGEST), taken.place, leaf))
        theirs = self.theirs[number][-1] if number < len(self.theirs) else leaf
        if self.opened is None and theirs != leaf:
            self.opened = _opened(number, taken)


def _opened(number: int, taken: TakenOperation) -> OpenedOperation:
    found = [on_host(x) for x in taken.results]
    right = [_nan_as_found(*pair) for pair in zip(found, recomputed(taken), strict=True)]
    arrays = [*map(on_host, taken.inputs), *found]
    return OpenedOperation(
        number=number,
        shapes=tuple(f"{array.dtype.name}{list(array.shape)}" for array in arrays[:64]),
        right=taken._replace(results=right).hash,
        first=_first_difference(found, right),
    )


def _nan_as_found(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the right value for a record; a NaN may have any of the bits that say so."""
    if found.dtype.kind != "f":
        return right
    return np.where(np.isnan(found) & np.isnan(right), found, right)


def _first_difference(found: Arrays, right: Arrays) -> Element | None:
    for number, pair in enumerate(zip(found, right, strict=True)):
        flat = [np.ascontiguousarray(x).reshape(-1) for x in pair]
        unsigned = np.dtype(f"u{flat[0].dtype.itemsize}")
        places = np.flatnonzero(np.not_equal(*(x.view(unsigned) for x in flat)))
        if len(places):
            index = tuple(map(int, np.unravel_index(places[0], found[number].shape)))
            values = [(str(x[places[0]]), f"{x[places[0]].view(unsigned):x}") for x in flat]
            return Element(result=number, index=index, found=values[0], right=values[1])
    return None
