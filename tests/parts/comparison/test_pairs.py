"""Differences of rows, beside computations of their own, and how often tests of them err."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from parts.comparison.pairs import differences, holm, prior

SPREADS = (0.028, 0.032, 0.038, 0.034, 0.047, 0.031, 0.023, 0.088, 0.006, 0.045)


def inverse_trigamma(y: float) -> float:
    """By Newton's steps from above, as limma has them; the code brackets a root instead."""
    x = 0.5 + 1 / y
    for _ in range(60):
        value = special.polygamma(1, x)
        x += value * (1 - value / y) / special.polygamma(2, x)
    return x


def test_a_pair_alone_has_students_t():
    a, b = [4.0, 5.0, 6.0], [5.0, 6.1, 7.2]
    (found,) = differences({"a": a, "b": b})
    expected = stats.ttest_rel(b, a)
    low, high = expected.confidence_interval(0.95)
    assert found[2:6] == pytest.approx((1.1, low, high, expected.pvalue))
    assert found.holm == found.p and found.told_apart
    assert differences({"a": [4.0], "b": [9.0]})[0][2:] == (5.0, None, None, None, None)
    same = differences(
        {"a": a, "b": a, "c": [1.0, 2.0, 3.0]}
    )  # as of a failure that changes no bit
    assert [one.p for one in same] == [1.0, 0.0, 0.0] and same[0][3:5] == (0.0, 0.0)


def test_a_small_variance_is_shrunk_towards_that_of_all_pairs_and_a_large_one_is_kept():
    """In NumPy: limma's moments, Newton's inverse of the trigamma, Student's t."""
    rng = np.random.default_rng(1)
    losses = {str(i): list(4 + i / 50 + rng.normal(size=4) * s) for i, s in enumerate(SPREADS)}
    found = differences(losses)
    gaps = np.array([np.subtract(losses[one.worse], losses[one.better]) for one in found])
    variance, d = gaps.var(axis=1, ddof=1), 3
    z = np.log(variance)
    d0 = 2 * inverse_trigamma(z.var(ddof=1) - special.polygamma(1, d / 2))
    s0 = np.exp(z.mean() - special.digamma(d / 2) + np.log(d / d0) + special.digamma(d0 / 2))
    assert prior(variance, d) == pytest.approx((d0, s0)) and 0.5 < d0 < 50
    shrunk = (d0 * s0 + d * variance) / (d0 + d)
    error = np.sqrt(np.maximum(shrunk, variance) / 4)
    assert 5 < sum(shrunk > variance) < 40
    t = stats.t(min(d0 + d, 9 * 3))
    np.testing.assert_allclose([one.p for one in found], 2 * t.sf(abs(gaps.mean(axis=1)) / error))
    np.testing.assert_allclose([one.high - one.mean for one in found], t.ppf(0.975) * error)


def test_the_prior_of_variances_that_were_drawn_from_one_is_found():
    rng, d, d0, s0 = np.random.default_rng(0), 4, 6, 0.02
    drawn = s0 * d0 / rng.chisquare(d0, 20_000) * rng.chisquare(d, 20_000) / d
    assert prior(drawn, d) == pytest.approx((d0, s0), rel=0.1)
    alike = 0.02 * rng.chisquare(d, 20_000) / d
    assert prior(alike, d)[0] > 100 and prior(alike, d)[1] == pytest.approx(0.02, rel=0.05)
    assert prior([0.01, 0.01], d)[0] == np.inf and prior([0.01, 0.0], d) == (0, 0)


def test_holm_is_the_closed_test_of_bonferroni():
    """A pair is told apart where every set of pairs that has it is, by its smallest p."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        p = list(rng.uniform(size=5) ** 4)
        sets = [s for r in range(1, 6) for s in itertools.combinations(range(5), r)]
        closed = [
            max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(5)
        ]
        np.testing.assert_allclose(holm(p), closed)
    assert holm([]) == []


def test_a_pair_that_was_named_counts_also_where_its_rows_are_absent():
    losses = {"a": [4.0, 4.1, 4.3], "b": [4.2, 4.2, 4.4], "c": [4.3, 4.6, 4.5]}
    named = [frozenset(pair) for pair in (("a", "b"), ("b", "x"), ("x", "y"))]
    first, second, _ = differences(losses, tested=named)
    assert first.holm == min(1.0, 3 * first.p) and second.holm is None


@pytest.mark.parametrize(("seeds", "tested"), [(3, 45), (5, 7)])
@pytest.mark.parametrize("spreads", [(0.03,), SPREADS])
def test_a_table_of_rows_that_are_alike_seldom_shows_a_difference(spreads, seeds, tested):
    """Of 400 tables with nothing to find; each pair alone would be wrong in far more of them."""
    rng, wrong, alone = np.random.default_rng(0), 0, 0
    for _ in range(400):
        losses = rng.normal(size=(10, seeds)) * np.resize(spreads, 10)[:, None]
        rows = {str(i): list(row) for i, row in enumerate(losses)}
        pairs = [frozenset(pair) for pair in itertools.combinations(rows, 2)]
        named = [pairs[i] for i in rng.choice(45, tested, replace=False)]
        found = [one for one in differences(rows, tested=named) if one.holm is not None]
        assert len(found) == tested
        wrong += any(one.told_apart for one in found)
        alone += any(one.p <= 0.05 for one in found)
    assert wrong / 400 <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5 < 0.1 < alone / 400
