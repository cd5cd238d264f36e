"""A seeded permutation of 0..n-1 that is computed one index at a time, in constant memory.

A Feistel network is a bijection of pairs (left, right) whatever its round function does. Over the
smallest pairs of equal width that can count to n, an index that falls outside 0..n-1 is sent
through again until it falls inside (cycle walking), and so the whole is a bijection of 0..n-1.

It is the same on every platform: SHA-256 and integers of 64 bits without a sign, and no floating
point. Nothing is kept but the round keys, so 10**11 sequences take no more memory than ten.

Psyche's `Shuffle::Seeded` is another function of the same 32 bytes: the Fisher-Yates shuffle of
rand 0.9 over ChaCha8, of a list of all sequences held in memory, of which entry i is read for index
i. The order here is not that one, and no batch of a shuffled Psyche run is repeated here; the
guarantee is the same: the seed and n fix the order, and each sequence comes exactly once. To draw
Psyche's order one has to shuffle the whole list, whichever index is asked for; nor would it be the
same list, since Psyche leaves out the last sequence of some files (`pipeline/tokens/sequences.py`).
"""

import hashlib
from functools import lru_cache

import numpy as np

ROUNDS = 8
SEED_BYTES = 32
MOST_INDICES = 2**62  # an index is a pair of halves, of at most 31 bits each


def permute(seed: bytes, index_N: np.ndarray, n: int) -> np.ndarray:
    """Return the image of each index under the seeded permutation of 0..n-1.

    For round r, with key k_r = SHA-256(seed | r)[:8] and the mask of half a pair's bits:
    (left, right) <- (right, left xor (mix(right + k_r) & mask)).

    `index_N` holds integers and may have any shape; the images are int64 of the same shape.

    Raises:
      ValueError: the seed has not 32 bytes, n is not 1..2**62, or an index is not in 0..n-1.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"seed: {len(seed)} bytes, expected {SEED_BYTES}")
    if not 1 <= n <= MOST_INDICES:
        raise ValueError(f"n = {n}, expected 1..{MOST_INDICES}")
    index_N = np.asarray(index_N, dtype=np.int64)
    if index_N.size and (index_N.min() < 0 or index_N.max() >= n):
        raise ValueError(f"an index outside 0..{n - 1}")

    half_bits = max(1, -(-(n - 1).bit_length() // 2))
    keys = _round_keys(seed)
    image_N = _feistel(index_N.reshape(-1).astype(np.uint64), keys, half_bits)
    outside = np.flatnonzero(image_N >= n)
    while outside.size:  # a pair counts to less than 4 n: a few passes over ever fewer indices
        image_N[outside] = _feistel(image_N[outside], keys, half_bits)
        outside = outside[image_N[outside] >= n]
    return image_N.astype(np.int64).reshape(index_N.shape)


@lru_cache(maxsize=8)
def _round_keys(seed: bytes) -> tuple[np.uint64, ...]:
    digests = (hashlib.sha256(seed + bytes([r])).digest() for r in range(ROUNDS))
    return tuple(np.uint64(int.from_bytes(digest[:8], "little")) for digest in digests)


def _feistel(pair_N: np.ndarray, keys: tuple[np.uint64, ...], half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_N, right_N = pair_N >> shift, pair_N & mask
    for key in keys:
        left_N, right_N = right_N, left_N ^ (_mix(right_N + key) & mask)
    return left_N << shift | right_N


def _mix(x_N: np.ndarray) -> np.ndarray:
    """Mix a permutation's bits as SplitMix64 does (Steele, Lea and Flood 2014), modulo 2**64."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))
