"""A record: what each operation of a part of a round is, and the hash of what it gives."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lockstep.errors import expecting
from lockstep.files import read_bytes
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from parts.bits.by_operation import TakenOperation
from parts.bits.opened import Arrays, on_host
from parts.bits.operation import INPUT, BoundedText, RecordedOperation
from parts.bits.tree import MerkleTree, leaf, tree_over
from pipeline.stage.keys import digest

MOST_BYTES, MOST_OPERATIONS = 2**26, 2**19
PartOfRound = Literal["step", "merge", "loss", "weights"]


class OfARun(Table):
    """Which part of which round of which run it is."""

    format: Literal[2] = 2
    """Version of the format."""
    key: Hash
    """SHA-256 of the tables of the run file that determine the rounds, and of the model."""
    of: PartOfRound
    """What was taken by its operations: a peer's step, the merge, a loss or the fresh weights."""
    round: int
    """The round."""
    peer: int
    """The peer, whose step and rows they are."""


class BitsClaim(OfARun):
    """What the root of a record stands for."""

    count: Annotated[int, Field(ge=1, le=MOST_OPERATIONS)]
    """How many operations there are."""
    program: Hash
    """Top of the tree over what each operation is."""
    top: Hash
    """Top of the tree over what each operation is, and gives."""

    @property
    def root(self) -> Hash:
        """The hash of all of it."""
        return digest(self.model_dump(mode="json"))


class BitsRecord(OfARun):
    """The operations of a part of a round."""

    machine: Annotated[dict[BoundedText, BoundedText], Field(max_length=16)]
    """What computed it."""
    operations: Annotated[
        tuple[RecordedOperation, ...], Field(min_length=1, max_length=MOST_OPERATIONS)
    ]
    """Its inputs, its operations in their order, and its outputs."""

    @cached_property
    def program(self) -> MerkleTree:
        """The tree over what each operation is."""
        described = (one.described(number) for number, one in enumerate(self.operations))
        return tree_over(map(leaf, described))

    @cached_property
    def tree(self) -> MerkleTree:
        """The tree over what each operation is, and gives."""
        return tree_over(one.leaf(number) for number, one in enumerate(self.operations))

    @property
    def claim(self) -> BitsClaim:
        """What is claimed by the record."""
        tops = {"program": self.program[-1][0].hex(), "top": self.tree[-1][0].hex()}
        fields = self.model_dump(include=set(OfARun.model_fields)) | tops
        return BitsClaim(count=len(self.operations), **fields)


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

    Of the first whose results differ from another record's, operands and results are kept; of all
    others only the hash is computed.
    """

    def __init__(self, against: BitsRecord | None = None):
        self.theirs = against.operations if against else ()
        self.operations = list[RecordedOperation]()
        self.parted: tuple[Arrays, Arrays] | None = None

    def hear(self, taken: TakenOperation) -> None:
        """Keep what an operation is, and the hash of its results."""
        number, said = len(self.operations), taken.said
        self.operations.append(said)
        theirs = self.theirs[number] if number < len(self.theirs) else said
        if self.parted is None and theirs.results != said.results and said.primitive != INPUT:
            self.parted = list(map(on_host, taken.operands)), list(map(on_host, taken.results))
