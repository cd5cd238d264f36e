"""Several lists of sequences merged into one by weight: who stands where is computed, not stored.

Part p gives n_p of the N places. Its item j (from 0) stands at the height (2j + 1) / (2 n_p): the
middle of the j-th of n_p equal stretches of 0..1. All items in the order of their heights, equal
heights in the order of the parts, are the mixture.

Let w_p = n_p / N be the share of part p, and K the number of parts that give anything. Among the
first i places, for every i, part p has i w_p of them, give or take 1/2 + w_p (K - 2) / 2: below any
height t each part has t n_p items, give or take a half, and these errors add up to t N - i. So of
two parts neither is ever more than half an item ahead of its share.

Psyche's weighted provider gives place i to the part that is furthest behind: the first of the
largest w_p max(i, 1) - drawn_p, which it follows from place 0 on and keeps as a list of all N. Here
the N and the weights are the same, and so is what a part gives that is drawn beyond its end (it
begins again); who stands where is not. Of two parts, Psyche's are less than one item from their
share, so that, where w_p N is whole, the two rules never differ by more than one item among the
first i.

Shapes: K parts, N indices.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LARGEST = 2**62  # places: as many as a permutation may have
FAST = 2**31 - 1  # of these heights are exact in 61 bits; of more, in Python's own integers


def counts(weights: Sequence[float | None], sizes: Sequence[int]) -> np.ndarray:
    """How many places each part gets, of as many places as there are sequences.

    With weights, n_p is w_p / sum(w) * N rounded down, and the places that this leaves go to the
    largest remainders, equal ones in the order of the parts. Without, n_p is the part's size.

    Args:
      weights: greater than 0, one for each part; or None for each.
      sizes: sequences of each part.

    Returns:
      int64 [K], whose sum is that of `sizes`.
    """
    if None in weights:
        return np.array(sizes, np.int64)
    # Weights are fractions as they stand: no rounding, so no platform counts otherwise.
    exact, total = [Fraction(weight) for weight in weights], sum(sizes)
    shares = [weight * total / sum(exact) for weight in exact]
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: whole[part] - shares[part])
    for part in by_remainder[: total - sum(whole)]:
        whole[part] += 1
    return np.array(whole, np.int64)


def place(counts_K: np.ndarray, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What stands at each place of the mixture.

    Args:
      counts_K: how many places each part gets, n_p; their sum is at most 2**62.
      index_N: places, from 0 to the sum less one, in any order.

    Returns:
      part_N, drawn_N: int64; the part, and how many of it stand before this place.

    Raises:
      ValueError: there are too many places, or an index is not among them.
    """
    counts_K = np.asarray(counts_K, np.int64)
    index_N = np.asarray(index_N, np.int64)
    total = int(counts_K.sum())
    if total > LARGEST:
        raise ValueError(f"{total} places, expected at most {LARGEST}")
    if index_N.size and (index_N.min() < 0 or index_N.max() >= total):
        raise ValueError(f"an index outside 0..{total - 1}")
    giving = np.flatnonzero(counts_K)
    exact = np.int64 if total <= FAST else object
    n_K, index_N = counts_K[giving].astype(exact), index_N.astype(exact)

    # All items below the height (index - behind) / N are at most `index` many for behind = K/2, and
    # hardly fewer: from there the mixture is followed, item after item, until the place is reached.
    # Most of the K errors cancel, so that a start less far behind is rarely beyond the place.
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
    """[N, K]: items of each part that lie not above the height (index - behind / 2) / N."""
    total = n_K.sum()
    return (np.maximum(2 * index_N - behind, 0)[:, None] * n_K + total) // (2 * total)


def _heights(drawn: np.ndarray, n: np.ndarray) -> np.ndarray:
    """(2 drawn + 1) / (2 n) in units of 2**-61, or of 2**-124 where there are many; rounded down.

    Two heights that differ do so by at least 1 / (2 n_p n_q) >= 2 / N**2 > 2**-61, or 2**-124, and
    so they differ here as well: no comparison comes out otherwise than that of the fractions.
    """
    if n.dtype == object:
        return ((2 * drawn + 1) << 124) // (2 * n)
    high, rest = np.divmod((2 * drawn + 1) << 30, 2 * n)
    return (high << 31) + (rest << 31) // (2 * n)
