"""Who does what in a round, drawn from the round's seed: assignment, committee, witnesses, quorum.

Everything here is a pure function of small integers and agrees with Psyche bit for bit. Peers are
given by their index, which is their place in the epoch's list of peers.
"""

import enum
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

MAX_WITNESSES = 32  # also how many are elected when witness_nodes = 0, "everyone"
SHUFFLE_ROUNDS = 90
U64 = (1 << 64) - 1


class Committee(enum.Enum):
    """What a peer does in a round, as Psyche names it."""

    TieBreaker = 0
    Verifier = 1
    Trainer = 2


def round_seed(run_seed: int, step: int) -> int:
    """Return the seed of round `step`, an unsigned 64-bit integer.

    The first 8 bytes, little-endian, of SHA-256("lockstep/round_seed:<run_seed>:<step>").
    """
    text = f"lockstep/round_seed:{run_seed}:{step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def lcg(seed: int) -> Iterator[int]:
    """Yield x <- 6364136223846793005 x + 1442695040888963407 mod 2^64, from x = `seed`."""
    state = seed & U64
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & U64
        yield state


def deterministic_shuffle(items: Sequence[int], seed: int) -> list[int]:
    """Return `items` in the order of a Fisher-Yates shuffle driven by `lcg(seed)`."""
    shuffled = list(items)
    draws = lcg(seed)
    for last in range(len(shuffled) - 1, 0, -1):
        other = next(draws) % (last + 1)
        shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
    return shuffled


@lru_cache(maxsize=16)  # the coordinator asks again at every witness message of a round
def swap_or_not(count: int, seed: bytes) -> tuple[int, ...]:
    """Return the position of each index 0..count-1 under the swap-or-not shuffle.

    In each of 90 rounds an index may swap with its mirror image around a pivot, as one bit of a
    hash says; a pair shares its bit, so that the result is a permutation.

    Args:
      count: How many indices there are.
      seed: 32 bytes.

    References:
      Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", 2012.
    """
    places = list(range(count))
    for r in range(SHUFFLE_ROUNDS if count > 1 else 0):
        prefix = seed + bytes([r])
        pivot = int.from_bytes(hashlib.sha256(prefix).digest()[:8], "little") % count
        blocks = [
            hashlib.sha256(prefix + block.to_bytes(4, "little")).digest()
            for block in range((count + 255) // 256)
        ]
        for index, place in enumerate(places):
            flip = (pivot + count - place) % count
            high = max(place, flip)
            if blocks[high // 256][high % 256 // 8] >> (high % 8) & 1:
                places[index] = flip
    return tuple(places)


def positions(random_seed: int, count: int, salt: str) -> tuple[int, ...]:
    """Return each index's position in the shuffle that `salt` ("committee" or "witness") names."""
    seed = hashlib.sha256(random_seed.to_bytes(8, "little")).digest()
    return swap_or_not(count, hashlib.sha256(seed + salt.encode()).digest())


def committees(
    random_seed: int, count: int, *, verification_percent: int, tie_breakers: int
) -> tuple[Committee, ...]:
    """Return what each index does: the first positions break ties, the next verify, the rest train.

    Verifiers are floor((count - tie_breakers) verification_percent / 100).

    Raises:
      ValueError: More tie-breakers than peers, or a percentage outside 0..100.
    """
    if not 0 <= tie_breakers <= count:
        raise ValueError(f"tie_breakers = {tie_breakers}, expected 0 to {count} peers")
    if not 0 <= verification_percent <= 100:
        raise ValueError(f"verification_percent = {verification_percent}, expected 0 to 100")
    verifiers = (count - tie_breakers) * verification_percent // 100

    def seat(position: int) -> Committee:
        if position < tie_breakers:
            return Committee.TieBreaker
        return Committee.Verifier if position < tie_breakers + verifiers else Committee.Trainer

    return tuple(seat(position) for position in positions(random_seed, count, "committee"))


def witnesses(random_seed: int, count: int, witness_nodes: int) -> tuple[int, ...]:
    """Return the indices of the elected witnesses, ascending; `witness_nodes` = 0 elects up to 32.

    Raises:
      ValueError: More witnesses asked for than there are peers.
    """
    if not 0 <= witness_nodes <= count:
        raise ValueError(f"witness_nodes = {witness_nodes}, expected 0 to {count} peers")
    elected = witness_nodes or MAX_WITNESSES
    places = positions(random_seed, count, "witness")
    return tuple(index for index, position in enumerate(places) if position < elected)


def witness_quorum(elected: int) -> int:
    """Return how many of `elected` witnesses must agree: all of 1 or 2, else 2/3 rounded down.

    Raises:
      ValueError: No witness was elected.
    """
    if elected < 1:
        raise ValueError(f"{elected} witnesses elected, expected at least 1")
    return elected if elected <= 2 else elected * 2 // 3


def assign(
    trainers: Sequence[int], random_seed: int, data_index: int, batch_size: int
) -> dict[int, tuple[int, int]]:
    """Return each trainer's sequences as (first, last), both included.

    Trainers in shuffled order take contiguous ranges from `data_index` on: floor(B / T) sequences
    each, and one more for the first B mod T of them. A trainer that gets none is absent.

    Args:
      trainers: Peers that train this round, in the epoch's order (T of them).
      random_seed: The round's seed.
      data_index: First sequence of the batch.
      batch_size: Sequences in the batch (B).
    """
    if not trainers:
        raise ValueError("no trainers to assign a batch to, expected at least 1")
    base, extra = divmod(batch_size, len(trainers))
    ranges, first = {}, data_index
    for place, peer in enumerate(deterministic_shuffle(trainers, random_seed)):
        size = base + (place < extra)
        if size:
            ranges[peer] = (first, first + size - 1)
            first += size
    return dict(sorted(ranges.items()))
