"""The sketch of a message that is not kept: which of its pieces stay in the transcript.

Senders commit to the Merkle root over the pieces of a message. Only when all of a round's
commitments are known are pieces drawn, by

    draw    = SHA-256("lockstep/sketch:<seed of the next round>:" + for each sender, ascending: its
              number, u32 little-endian, and its commitment)
    piece i = first 8 bytes, u64 little-endian, of SHA-256(draw + sender u32 + i u32), modulo count

for i = 0, 1, ... until enough different pieces are drawn. Seeds of rounds follow from the run file
alone, so without the commitments everyone would know the pieces beforehand. Whoever commits last,
and the author of a whole transcript, can still try messages until the draw suits: with a share f
of the pieces false and S of them drawn, that takes (1 - f)^-S tries on average.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from lockstep.protocol import committee
from lockstep.protocol.sets import MerkleTree, root_above
from lockstep.wire.pieces import HASH, Pieces
from lockstep.wire.spool import Buffer


def drawn(
    seed: int, step: int, commitments: Mapping[int, str], peer: int, pieces: int, count: int
) -> list[int]:
    """Return which of the pieces of the message that `peer` sent are drawn: `count`, ascending.

    `seed` is the run's; `commitments` are the round's, by sender, hex.
    """
    words = f"lockstep/sketch:{committee.round_seed(seed, step + 1)}:"
    draw, chosen, number = committee.drawn_after(commitments, words), set[int](), 0
    while len(chosen) < count:
        numbers = peer.to_bytes(4, "little") + number.to_bytes(4, "little")
        digest = hashlib.sha256(draw + numbers).digest()
        chosen.add(int.from_bytes(digest[:8], "little") % pieces)
        number += 1
    return sorted(chosen)


def sketch_of(
    pieces: Pieces, fields: Iterable[Buffer], tree: MerkleTree, drawn: Sequence[int]
) -> bytes:
    """Return a message's sketch: each drawn piece, ascending, and then its path to the root."""
    by_number = pieces.split(pieces.chosen(fields, drawn), drawn)
    return b"".join(b"".join([by_number[n], *tree.path(n)]) for n in drawn)


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
    by_number, at = {}, 0
    for n in drawn:
        _, begin, end = pieces.ranges[n]
        by_number[n], at = sketch[at : at + end - begin], at + end - begin
        path = [sketch[i : i + HASH] for i in range(at, at + pieces.path, HASH)]
        at += pieces.path
        if root_above(by_number[n], n, path) != root:
            raise ValueError(f"piece {n} does not lead to the root {root.hex()[:12]}")
    return by_number
