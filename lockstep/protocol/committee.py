"""Elections and assignments of a round, drawn from its seed: committee, witnesses, sequences.

Everything here is a pure function of small integers. It agrees with Psyche bit for bit, except that
Psyche has no verifiers, reassigns no sequence, and takes two of four witnesses as a quorum.

A draw that guards against liars must not be known before the lie, but all seeds follow from the run
file. So whom verifiers check is drawn from the round's commitments as well (`drawn_after`).
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_WITNESSES = 32  # witness_nodes = 0 elects so many, or all of fewer peers
SHUFFLE_ROUNDS = 90
U64 = (1 << 64) - 1


def round_seed(run_seed: int, step: int) -> int:
    """Return the seed from which round `step` draws its committee, 64 bits, unsigned.

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


def swap_or_not(count: int, seed: bytes, first: int) -> list[int]:
    """Return the indices that the swap-or-not shuffle of 0..count-1 puts at its `first` positions.

    In each of 90 rounds an index swaps with its mirror image around a pivot if one bit of a hash
    is set; a pair shares its bit, so the result is a permutation. A round is its own inverse, so
    taking the rounds in reverse leads from a position to its index, without shuffling the others.
    The seed has 32 bytes.

    References:
      Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", 2012.
    """
    indices = list(range(min(first, count)))
    for r in reversed(range(SHUFFLE_ROUNDS if count > 1 else 0)):
        prefix = seed + bytes([r])
        pivot = int.from_bytes(hashlib.sha256(prefix).digest()[:8], "little") % count
        blocks = (block.to_bytes(4, "little") for block in range((count + 255) // 256))
        bits = b"".join([hashlib.sha256(prefix + block).digest() for block in blocks])
        for position, index in enumerate(indices):
            flip = (pivot - index) % count
            high = index if index > flip else flip  # max() takes as long as all the rest
            if bits[high >> 3] >> (high & 7) & 1:
                indices[position] = flip
    return indices


@lru_cache(maxsize=16)  # the coordinator needs it again at every witness's message of a round
def order(random_seed: int, count: int, salt: str, first: int) -> tuple[int, ...]:
    """Return a round's elected indices: at the `first` positions of the shuffle that `salt` names.

    Indices are positions in a list of peers; salts are "committee", "witness" and "verify".
    """
    seed = hashlib.sha256(random_seed.to_bytes(8, "little")).digest()
    seed = hashlib.sha256(seed + salt.encode()).digest()
    return tuple(swap_or_not(count, seed, first))


def trainers_of(count: int, verification_percent: int) -> int:
    """Return how many of `count` members train in a round; the others are its `verifiers`."""
    return count - count * verification_percent // 100


def verifiers(random_seed: int, count: int, verification_percent: int) -> frozenset[int]:
    """Return the elected verifiers: the first floor(count verification_percent / 100) positions.

    These verify, and the others train, as in a committee of Psyche's without tie-breakers.
    """
    elected = count - trainers_of(count, verification_percent)
    return frozenset(order(random_seed, count, "committee", elected)) if elected else frozenset()


@lru_cache(maxsize=16)
def witnesses(random_seed: int, count: int, witness_nodes: int) -> tuple[int, ...]:
    """Return the indices of the elected witnesses, ascending; `witness_nodes` = 0 elects up to 32.

    A run file has at most min_clients of them, and so no more than peers.
    """
    elected = witness_nodes or MAX_WITNESSES
    if elected >= count:  # whatever their order
        return tuple(range(count))
    return tuple(sorted(order(random_seed, count, "witness", elected)))


def witness_quorum(elected: int) -> int:
    """Return how many of `elected` witnesses must agree: 2/3 rounded down, and more than half."""
    return max(elected * 2 // 3, elected // 2 + 1)


def drawn_after(commitments: Mapping[int, str], words: str) -> bytes:
    """Return a draw from a round's commitments, which nobody knows before the last of them.

        SHA-256(words + for each sender, ascending: its number, u32 little-endian, its commitment)

    The words name the draw and its seed, so that no two draws are alike; commitments are in hex.
    """
    return _drawn_after(tuple(sorted(commitments.items())), words)


@lru_cache(maxsize=4)  # asked again for each peer of a round
def _drawn_after(commitments: tuple[tuple[int, str], ...], words: str) -> bytes:
    digest = hashlib.sha256(words.encode())
    for peer, commitment in commitments:
        digest.update(peer.to_bytes(4, "little") + bytes.fromhex(commitment))
    return digest.digest()


def verified(random_seed: int, verifiers: Sequence[int], trainers: Sequence[int]) -> dict[int, int]:
    """Return the trainer whose step each drawn verifier recomputes.

    Verifiers in ascending order get trainers in the order of the shuffle "verify", which starts
    over if there are fewer trainers. Without verifiers or trainers, the result is empty.
    """
    if not trainers or not verifiers:
        return {}
    first = [trainers[i] for i in order(random_seed, len(trainers), "verify", len(verifiers))]
    return {peer: first[i % len(first)] for i, peer in enumerate(sorted(verifiers))}


# ---- assignment ----

Span = tuple[int, int]  # sequences first..last, both included


class Assignment(NamedTuple):
    """The assignment of a round: who trains on what, what of it is new, and what has to wait."""

    spans: dict[int, Span]  # of each trainer; one without sequences is absent
    fresh: int  # number of new sequences, by which the data index advances
    waiting: tuple[Span, ...]  # untrained ones of earlier rounds that do not fit into this round


def plan(
    trainers: Sequence[int],
    random_seed: int,
    data_index: int,
    batch_size: int,
    untrained: Sequence[Span] = (),
) -> Assignment:
    """Return the assignment: to each of T trainers, one interval of at most ceil(B / T) sequences.

    Spans that are `untrained`, since nobody applied their messages, come first, in pieces of that
    size, one for each trainer in shuffled order, as long as the whole piece fits into the batch, B.
    The R remaining trainers share the rest of it, at most R ceil(B / T) sequences, in contiguous
    ranges from `data_index` on: floor(fresh / R) each, and one more for the first fresh mod R. If
    nothing is untrained, this is Psyche's assignment, bit for bit.
    """
    share = -(-batch_size // len(trainers))
    pieces, waiting = _pieces(untrained, share, len(trainers), batch_size)
    remaining = len(trainers) - len(pieces)
    fresh = min(batch_size - sum(last - first + 1 for first, last in pieces), remaining * share)
    new = _split(data_index, fresh, remaining) if fresh else []
    shuffled = deterministic_shuffle(trainers, random_seed)
    spans = dict(sorted(zip(shuffled, pieces + new, strict=False)))
    return Assignment(spans=spans, fresh=fresh, waiting=waiting)


def plan_shares(
    shares: Mapping[int, int], random_seed: int, data_index: int, untrained: Sequence[Span] = ()
) -> Assignment:
    """Return the assignment in which each trainer has a share of its own; the rest is as in `plan`.

    In shuffled order each takes the next piece of the untrained sequences, at most its share; when
    none are left, it takes its share of new ones, in contiguous ranges from `data_index` on.
    """
    spans, queue, begin = {}, deque(untrained), data_index
    for peer in deterministic_shuffle([*shares], random_seed):
        share = shares[peer]
        if not queue:
            spans[peer] = begin, begin + share - 1
            begin += share
            continue
        first, last = queue.popleft()
        spans[peer] = first, min(last, first + share - 1)
        if last >= first + share:
            queue.appendleft((first + share, last))
    return Assignment(dict(sorted(spans.items())), begin - data_index, tuple(queue))


def _pieces(
    spans: Sequence[Span], share: int, count: int, batch_size: int
) -> tuple[list[Span], tuple[Span, ...]]:
    """Return at most `count` pieces of an assigned `share`, `batch_size` in all; and the rest."""
    pieces: list[Span] = []
    queue = deque(spans)
    while queue and len(pieces) < count:
        first, last = queue[0]
        end = min(last, first + share - 1)
        batch_size -= end - first + 1
        if batch_size < 0:
            break
        pieces.append((first, end))
        if end == last:
            queue.popleft()
        else:
            queue[0] = (end + 1, last)
    return pieces, tuple(queue)


def _split(first: int, size: int, parts: int) -> list[Span]:
    """Return `size` assigned sequences from `first` on, in ranges of about one size."""
    base, extra = divmod(size, parts)
    sizes = [base + (part < extra) for part in range(parts)]
    starts = [first + part * base + min(part, extra) for part in range(parts)]
    return [(start, start + size - 1) for start, size in zip(starts, sizes, strict=True) if size]
