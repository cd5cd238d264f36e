"""The mixture: each item once, each part in its order and never far from its share."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tokens.mixture import FAST, MOST_INDICES, counts, place

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)
SIZES = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 50)), min_size=1, max_size=6)


def merged(counts_K: list[int]) -> list[tuple[int, int]]:
    """The mixture by sorting, in fractions."""
    items = [(part, item) for part, count in enumerate(counts_K) for item in range(count)]
    return sorted(items, key=lambda i: (Fraction(2 * i[1] + 1, 2 * counts_K[i[0]]), i[0]))


def psyche(weights: list[float], sizes: list[int]) -> list[tuple[int, int]]:
    """Psyche's weighted provider: the part that is furthest behind, the first of equal ones."""
    shares, drawn, order = np.array(weights) / sum(weights), np.zeros(len(sizes)), []
    for i in range(sum(sizes)):
        part = int(np.argmax(shares * max(i, 1) - drawn))
        order.append((part, int(drawn[part])))
        drawn[part] += 1
    return order


def placed(counts_K: list[int]) -> list[tuple[int, int]]:
    part_N, drawn_N = place(np.array(counts_K), np.arange(sum(counts_K)))
    return list(zip(part_N.tolist(), drawn_N.tolist(), strict=True))


def ahead(parts_N: np.ndarray, part: int) -> np.ndarray:
    """How many of a part stand among the first i, for each i."""
    return np.cumsum([0, *(parts_N == part)])


@given(SHARES)
def test_places_are_those_of_the_sorted_heights(counts_K):
    assert placed(counts_K) == merged(counts_K)


@given(SHARES)
def test_no_part_is_further_from_its_share_than_the_bound(counts_K):
    parts_N, total = np.array([part for part, _ in placed(counts_K)]), sum(counts_K)
    giving = sum(count > 0 for count in counts_K)
    for part, count in enumerate(counts_K):
        share = Fraction(count, total)
        bound = Fraction(1, 2) + share * (giving - 2) / 2 if giving > 1 else 0
        for i, drawn in enumerate(ahead(parts_N, part).tolist()):
            assert abs(drawn - i * share) <= bound


def test_golden_mixture():
    assert [part for part, _ in placed([7, 3])] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    part_N, drawn_N = place(np.array([1_400_000_000, 600_000_001, 3]), np.array([10**9, 2 * 10**9]))
    assert (part_N.tolist(), drawn_N.tolist()) == ([0, 0], [699_999_999, 1_399_999_997])


@pytest.mark.parametrize("counts_K", [[7, 3], [700, 300], [1, 999], [500, 500]])
def test_of_two_parts_no_prefix_differs_from_psyches_by_more_than_one(counts_K):
    total = sum(counts_K)
    theirs = psyche([count / total for count in counts_K], [total - 1, 1])
    ours = np.array([part for part, _ in placed(counts_K)])
    behind = ahead(ours, 0) - ahead(np.array([part for part, _ in theirs]), 0)
    assert np.abs(behind).max() <= 1


def test_psyches_rule_here_is_the_one_that_is_described():
    """The places of its example, 0.7 and 0.3, worked out by hand."""
    parts = [part for part, _ in psyche([0.7, 0.3], [9, 1])]
    assert parts == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]


def exact(counts_K: list[int], index: int) -> tuple[int, int]:
    """What stands at a place, by counting in whole numbers what stands before each candidate."""
    total = sum(counts_K)
    for part, n in enumerate(counts_K):
        for item in range(max(0, index * n // total - 9), min(n, index * n // total + 9)):
            before = 0
            for other, m in enumerate(counts_K):
                # items k with (2 k + 1) / (2 m) < (2 item + 1) / (2 n), or equal and before it
                above = (2 * item + 1) * m - n
                less = above // (2 * n) + 1 if other < part else -(-above // (2 * n))
                before += min(m, max(0, less))
            if before == index:
                return part, item
    raise AssertionError(index)


@settings(max_examples=30)
@given(st.data(), st.sampled_from([FAST, FAST + 1, MOST_INDICES]))
def test_places_are_exact_up_to_the_largest_mixture(data, total):
    parts = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=parts, max_size=parts)))
    counts_K = np.diff([0, *cuts[:-1], total]).tolist()
    indices = [*data.draw(st.lists(st.integers(0, total - 1), max_size=20)), 0, total - 1]
    part_N, drawn_N = place(np.array(counts_K), np.array(indices))
    found = list(zip(part_N.tolist(), drawn_N.tolist(), strict=True))
    assert found == [exact(counts_K, index) for index in indices]
    assert part_N.dtype == drawn_N.dtype == np.int64


@pytest.mark.parametrize(
    ("counts_K", "index"), [([3, 4], 7), ([3, 4], -1), ([0], 0), ([MOST_INDICES, 1], 0)]
)
def test_places_that_are_none_and_mixtures_too_large_are_refused(counts_K, index):
    with pytest.raises(ValueError):
        place(np.array(counts_K), np.array([index]))


@given(SIZES)
def test_counts_add_up_and_none_is_a_whole_item_from_its_share(weighted):
    weights, sizes = zip(*weighted, strict=True)
    found = counts(weights, sizes)
    assert found.sum() == sum(sizes)
    for weight, count in zip(weights, found.tolist(), strict=True):
        assert abs(Fraction(weight) / sum(map(Fraction, weights)) * sum(sizes) - count) < 1


def test_what_rounding_leaves_goes_to_the_largest_remainders_the_first_of_equal_ones():
    assert counts([0.7, 0.3], [90, 10]).tolist() == [70, 30]
    assert counts([1, 1, 1], [5, 0, 0]).tolist() == [2, 2, 1]
    assert counts([3, 2, 2], [10, 1, 1]).tolist() == [5, 4, 3]  # of 5.14, 3.43 and 3.43


def test_without_weights_each_part_gives_what_it_has():
    assert counts([None, None, None], [4, 0, 9]).tolist() == [4, 0, 9]
