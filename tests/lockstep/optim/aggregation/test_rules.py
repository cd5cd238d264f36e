"""Each rule is its formula, sees nobody who is absent, and tolerates as many liars as it says."""

from functools import cache
from itertools import product
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import RULES
from lockstep.same_bits.evaluation import same_bits
from pipeline.runfile import Peers
from tests.lockstep.optim.aggregation import reference

SIZES = [1e-45, 1e-30, 1.0, 1e3, 1e18, 1e20, 1e30, 3e38]  # of the largest element
WEIGHT = np.int32([3, 0, 2, 1, 0, 4, 2])
THERE = WEIGHT > 0


def values(seed=0, lies=0):
    """Peers that nearly agree, of which the last that are present lie."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 3)) + 0.3 * rng.standard_normal((len(WEIGHT), 5, 3))
    x[np.flatnonzero(THERE)[len(x[THERE]) - lies :]] = 1e4 * rng.standard_normal((lies, 5, 3))
    x[~THERE] = np.nan
    return x.astype(np.float32)


@cache
def compiled(rule, liars):
    return jax.jit(RULES[rule](liars))


def by_step(rule):
    return lambda x, weight, step: compiled(rule, 1)({"w": x}, weight)["w"]


def merged(rule, x, weight=WEIGHT, liars=1, group="w"):
    return np.array(compiled(rule, liars)({group: jnp.array(x)}, jnp.array(weight))[group])


def test_a_run_file_names_all_rules():
    assert set(get_args(Peers.model_fields["aggregation"].annotation)) == set(RULES)


@pytest.mark.parametrize("by_rules", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_each_is_its_formula_for_all_that_float32_holds(rule, by_rules):
    """Honest peers of each size, with a liar of each size: as XLA compiles it, and as merges go."""
    merge = jax.jit(same_bits(by_step(rule))) if by_rules else by_step(rule)
    ones = values(lies=1)[THERE].astype(np.float64)
    ones /= np.abs(ones).max(axis=(1, 2), keepdims=True)
    for honest, lied in product(SIZES, SIZES):
        x = values()
        x[THERE] = ones * np.array([honest] * (len(ones) - 1) + [lied])[:, None, None]
        x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # so XLA takes them
        by_hand = getattr(reference, rule)(x[THERE].astype(np.float64), WEIGHT[THERE], 1)
        error = np.abs(np.array(merge(x, WEIGHT, jnp.int32(1))) - by_hand).max()
        assert error <= max(1e-5 * np.abs(by_hand).max(), 1e-30), (honest, lied)


@pytest.mark.parametrize("rule", RULES)
def test_an_absent_peer_changes_no_bit_and_none_leave_zeros(rule):
    x = values()
    other = np.where(THERE[:, None, None], x, np.inf).astype(np.float32)
    np.testing.assert_array_equal(merged(rule, x), merged(rule, other))
    assert not merged(rule, x, 0 * WEIGHT).any()


@pytest.mark.parametrize("rule", RULES)
def test_peers_that_agree_and_a_lone_peer_are_taken_at_their_word(rule):
    x = np.broadcast_to(values()[:1], (len(WEIGHT), 5, 3))
    np.testing.assert_allclose(merged(rule, x), x[0], rtol=1e-6)
    alone = WEIGHT * (np.arange(len(WEIGHT)) == 2)
    expected = 0 * x[0] if rule == "min_support" else x[0]  # of one liar, if it is one
    np.testing.assert_allclose(merged(rule, x, alone), expected, rtol=1e-6)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "multi_krum", "centered_clip"])
def test_a_liar_moves_the_merged_values_no_farther_than_honest_peers_reach(rule):
    honest = values()[THERE]
    middle, reach = honest[:-1].mean(axis=0), np.ptp(honest, axis=0).max()
    assert np.abs(merged("mean", values(lies=1)) - middle).max() > 100 * reach
    assert np.abs(merged(rule, values(lies=1)) - middle).max() < 2 * reach


@pytest.mark.parametrize("rule", ["rda", "rda_median_norm"])
def test_directions_that_cancel_lead_nowhere_and_embeddings_are_averaged(rule):
    x = values()[:1]
    assert not merged(rule, np.concatenate([x, -x]), np.int32([1, 1])).any()
    averaged = merged(rule, values(), group="embed")
    np.testing.assert_allclose(averaged, merged("mean", values()), rtol=1e-6)


SENT = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 1, 0, 0]], [[0, 0, 0, 0]]], bool)
FEW = np.float32([[[5, 1, 9, 9]], [[9, 2, -3, 9]], [[9, 6, 9, 9]], [[np.nan] * 4]])


@pytest.mark.parametrize(
    ("rule", "liars", "expected"),
    [
        ("mean", 1, [5, 3, -3, 0]),
        ("peer_mean", 1, [5 / 3, 3, -1, 0]),
        ("median", 1, [5, 2, -3, 0]),
        ("trimmed_mean", 1, [5, 2, -3, 0]),
        ("min_support", 1, [0, 3, 0, 0]),
        ("min_support", 3, [0, 0, 0, 0]),
    ],
)
def test_of_elements_that_some_peers_sent(rule, liars, expected):
    """A lone sender owns its element, but for the two rules against it."""
    np.testing.assert_allclose(merged(rule, FEW, SENT, liars), [expected], rtol=1e-6)


@pytest.mark.parametrize("rule", ["norm_clip", "centered_clip"])
def test_norms_are_of_what_was_sent(rule):
    lied = FEW.copy()
    lied[0, 0, 1] = 1e6
    assert np.abs(merged(rule, lied, SENT)[0, 1]) < 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_values_of_any_float_and_arrays_without_elements_are_merged_as_float32(rule, dtype):
    x = values()[:, :, :2].astype(dtype)
    tree = {"w": x, "none": np.zeros((len(x), 0, 3), dtype), "scalar": x[:, 0, 0]}
    found = compiled(rule, 1)(jax.tree.map(jnp.array, tree), WEIGHT)
    wide = compiled(rule, 1)(jax.tree.map(np.float32, tree), WEIGHT)
    assert compiled(rule, 1)({"none": tree["none"]}, WEIGHT)["none"].shape == (0, 3)
    assert jax.tree.map(jnp.shape, found) == {"w": (5, 2), "none": (0, 3), "scalar": ()}
    for name in ("w", "scalar"):
        rounding = 0 if dtype == "float32" else 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.float32(found[name]), wide[name], rtol=0, atol=rounding)
