"""Sketches: drawn pieces of a message, with their paths to the Merkle root in its commitment."""

from collections.abc import Iterable, Sequence

from lockstep.protocol.merkle import MerkleTree, root_above
from lockstep.wire.pieces import HASH, Pieces
from lockstep.wire.spool import Buffer


def sketch_of(
    pieces: Pieces, fields: Iterable[Buffer], tree: MerkleTree, drawn: Sequence[int]
) -> bytes:
    """Return a message's sketch: each drawn piece, ascending, and then its path to the root."""
    found = pieces.split(pieces.chosen(fields, drawn), drawn)
    return b"".join(b"".join([found[n], *tree.path(n)]) for n in drawn)


def size_of(pieces: Pieces, drawn: Sequence[int]) -> int:
    """Return the size of the sketch of these pieces in bytes."""
    return sum(end - begin + pieces.path for _, begin, end in (pieces.ranges[n] for n in drawn))


def read(pieces: Pieces, sketch: bytes, drawn: Sequence[int], root: bytes) -> dict[int, bytes]:
    """Return the drawn pieces of a stranger's sketch, by their number.

    Raises:
      ValueError: It has another size, or a piece does not lead to the root.
    """
    if len(sketch) != (size := size_of(pieces, drawn)):
        raise ValueError(f"a sketch of {len(sketch)} bytes, expected {size}")
    found, at = {}, 0
    for n in drawn:
        _, begin, end = pieces.ranges[n]
        found[n], at = sketch[at : at + end - begin], at + end - begin
        path = [sketch[i : i + HASH] for i in range(at, at + pieces.path, HASH)]
        at += pieces.path
        if root_above(found[n], n, path) != root:
            raise ValueError(f"piece {n} does not lead to the root {root.hex()[:12]}")
    return found
