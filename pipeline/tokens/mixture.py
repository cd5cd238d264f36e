"""Several lists of sequences merged by weight: the order is computed, not stored.

Part p gives n_p of the N sequences. Its item j (from 0) is at the height (2j + 1) / (2 n_p): the
middle of the j-th of n_p equal intervals of 0..1. All items in the order of their heights, equal
heights in the order of the parts, are the mixture.

Let w_p = n_p / N be the share of part p, and K the number of parts that give anything. Among the
first i indices, for every i, part p has i w_p of them, give or take 1/2 + w_p (K - 2) / 2: below a
height t each part has t n_p items, give or take a half, and these errors add up to t N - i. So of
two parts neither is ever more than half an item ahead of its share.

Psyche's weighted provider gives index i to the part that is furthest behind: the first of the
largest w_p max(i, 1) - drawn_p, computed from index 0 on and kept as a list of all N. Here N and
the weights are the same, and so is what a part gives beyond its end (it begins again); the order is
not. Of two parts, Psyche's are less than one item from their share, so that, where w_p N is whole,
the two rules never differ by more than one item among the first i.

Shapes: K parts, N indices.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from lockstep.programs.permutation import MOST_INDICES

FAST = 2**31 - 1  # heights of so many indices are exact in 61 bits; more need Python's integers


def counts(weights: Sequence[float | None], sizes: Sequence[int]) -> np.ndarray:
    """Return how many indices each part of a mixture gets, as many in all as sequences.

    With weights, n_p is w_p / sum(w) * N rounded down, and the indices that this leaves go to the
    largest remainders, equal ones in the order of the parts. Without, n_p is the part's size.

    Weights are greater than 0, or None for each part. Return int64 [K], whose sum is that of the
    sizes.
    """
    if None in weights:
        return np.array(sizes, np.int64)
    # Weights are fractions as they stand: no rounding, so no platform counts otherwise.
    exact, total = [Fraction(weight) for weight in weights], sum(sizes)
    shares = [weight * total / sum(exact) for weight in exact]
    floors = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: floors[part] - shares[part])
    for part in by_remainder[: total - sum(floors)]:
        floors[part] += 1
    return np.array(floors, np.int64)


def place(counts_K: np.ndarray, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the item at each index of the mixture: its part, and how many items of it come before.

    `counts_K` are n_p of each part, whose sum is at most 2**62. Indices are from 0 to the sum less
    one, in any order. Both results are int64 [N].

    Raises:
      ValueError: there are too many indices, or one is out of range.
    """
    counts_K = np.asarray(counts_K, np.int64)
    index_N = np.asarray(index_N, np.int64)
    total = int(counts_K.sum())
    if total > MOST_INDICES:
        raise ValueError(f"{total} indices, expected at most {MOST_INDICES}")
    if index_N.size and (index_N.min() < 0 or index_N.max() >= total):
        raise ValueError(f"an index outside 0..{total - 1}")
    giving = np.flatnonzero(counts_K)
    exact = np.int64 if total <= FAST else object
    n_K, index_N = counts_K[giving].astype(exact), index_N.astype(exact)

    # All items below the height (index - behind) / N are at most `index` many for behind = K/2, and
    # hardly fewer: from there the mixture is followed, item after item, until the index is reached.
    # Most of the K errors cancel, so that a start less far behind is rarely beyond the index.
    drawn_NK = _below(n_K, index_N, len(n_K))
    near_NK = _below(n_K, index_N, math.isqrt(len(n_K)))
    reached = near_NK.sum(axis=1) <= index_N
    drawn_NK[reached] = near_NK[reached]
    left_N = index_N - drawn_NK.sum(axis=1)
    height_NK = _heights(drawn_NK, n_K)
    next_N = height_NK.argmin(axis=1)  # the first of equal ones
    rows = np.flatnonzero(left_N)
    while rows.size:  # at most K times
        parts = next_N[rows]
        drawn_NK[rows, parts] += 1
        height_NK[rows, parts] = _heights(drawn_NK[rows, parts], n_K[parts])
        next_N[rows] = height_NK[rows].argmin(axis=1)
        left_N[rows] -= 1
        rows = rows[left_N[rows] > 0]
    return giving[next_N], drawn_NK[np.arange(len(index_N)), next_N].astype(np.int64)


def _below(n_K: np.ndarray, index_N: np.ndarray, behind: int) -> np.ndarray:
    """Return how many items of each part are at most at height (index - behind / 2) / N: [N, K]."""
    total = n_K.sum()
    return (np.maximum(2 * index_N - behind, 0)[:, None] * n_K + total) // (2 * total)


def _heights(drawn: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return (2 drawn + 1) / (2 n) in units of 2**-61, or 2**-124 for large n, rounded down.

    Two heights that differ do so by at least 1 / (2 n_p n_q) >= 2 / N**2 > 2**-61, or 2**-124, and
    so they differ here too: every comparison agrees with that of the fractions.
    """
    if n.dtype == object:
        return ((2 * drawn + 1) << 124) // (2 * n)
    high, rest = np.divmod((2 * drawn + 1) << 30, 2 * n)
    return (high << 31) + (rest << 31) // (2 * n)
