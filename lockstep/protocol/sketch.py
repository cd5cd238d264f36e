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
from collections.abc import Mapping

from lockstep.protocol import committee


def drawn(
    seed: int, step: int, commitments: Mapping[int, str], peer: int, pieces: int, count: int
) -> list[int]:
    """Return which of a message's pieces are drawn, ascending.

    Args:
      seed: The run's seed.
      step: The round.
      commitments: The round's commitments by sender, hex.
      peer: The message's sender.
      pieces: Number of pieces of a message.
      count: How many are drawn, at most `pieces`.
    """
    words = f"lockstep/sketch:{committee.round_seed(seed, step + 1)}:"
    draw, found, number = committee.drawn_after(commitments, words), set[int](), 0
    while len(found) < count:
        numbers = peer.to_bytes(4, "little") + number.to_bytes(4, "little")
        digest = hashlib.sha256(draw + numbers).digest()
        found.add(int.from_bytes(digest[:8], "little") % pieces)
        number += 1
    return sorted(found)
