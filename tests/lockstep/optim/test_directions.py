"""Directions against singular values; and what is squared of a message is scaled before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import mean
from lockstep.optim.compressed import dct
from lockstep.optim.compressed.compressor import Coefficients, Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import adam
from lockstep.optim.directions import near_one, orthogonal
from lockstep.optim.local.outer_steps import _turned
from lockstep.optim.optimizer import RoundPeers

X = np.random.default_rng(0).standard_normal((2, 6, 5)).astype(np.float32)
CUT = dct.layout((4, 8), 4)
HUGE = np.float32(2.0**125)  # times a normal number it is finite, and no square of it is


def test_the_factor_near_one_is_a_power_of_two_for_all_that_float32_holds():
    sizes = np.float32([2.0**-126, 1e-30, 0.7, 1.0, 1.9, 3e18, 2.0**126, 3.4e38])
    factors = np.asarray(jax.vmap(near_one)(sizes[:, None]))
    assert (np.frexp(factors)[0] == 0.5).all()
    near = sizes.astype(np.float64) * factors
    assert (near >= 1).all() and (near < 4).all()
    assert near_one(np.zeros(3, np.float32)) == 2.0**127


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (3, 16, 12)])
def test_orthogonal_keeps_the_singular_vectors_and_levels_the_values(shape):
    x = np.random.default_rng(0).normal(size=shape)
    found = np.asarray(orthogonal(jnp.asarray(x, jnp.float32)), np.float64)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    inside = np.swapaxes(left, -1, -2) @ found @ np.swapaxes(right, -1, -2)
    levels = np.diagonal(inside, axis1=-2, axis2=-1)
    # the square matrix drawn here has a singular value of 1/80 of the largest; five steps reach it
    assert levels.min() > 0.5 * max(shape[-2:]) ** 0.5
    assert levels.max() < 1.25 * max(shape[-2:]) ** 0.5
    off = inside - levels[..., None] * np.eye(levels.shape[-1])
    np.testing.assert_allclose(off, 0, atol=1e-3)


@pytest.mark.parametrize("size", [HUGE, np.float32(2.0**-100)])
def test_a_direction_has_the_same_bits_whatever_the_size_and_none_of_zeros(size):
    np.testing.assert_array_equal(orthogonal(size * X), orthogonal(jnp.asarray(X)))
    assert not orthogonal(0 * X).any()


def test_adam_goes_on_after_a_gradient_whose_square_is_infinite():
    moments = adam((0.9, 0.99), 1e-8)
    state = moments.init(X)
    _, state = moments.update(HUGE * X, state)
    for _ in range(20):
        d, state = moments.update(jnp.asarray(X), state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((d, state)))
    assert (np.asarray(d) != 0).all()


def test_a_pseudogradient_is_turned_alike_whatever_its_size():
    by = {"keep": 0.9, "shrink": 1.0, "shrink_most": 0.9, "turn": 0.2, "trust": 1.0}
    for m in (X[0] + X[1], X[0] - 2 * X[1]):
        turned = np.asarray(_turned(X[1], m, **by))
        assert (turned != X[1]).any()
        np.testing.assert_array_equal(_turned(HUGE * X[1], HUGE * m, **by), HUGE * turned)


def test_coefficients_of_any_size_lead_to_a_finite_step():
    """Four peers send the largest values that there are: their sum is infinite, and a decoded
    coefficient would be."""
    compressor = Compressor(3, 4, False)
    momentum = CompressedMomentum(0.1, compressor, 0.9)
    params = {"w": jnp.ones((4, 8))}
    index = np.tile(np.uint8([0, 1, 5]), (4, 2, 1))
    most = jnp.finfo(jnp.bfloat16).max
    message = {"w": Coefficients(index, jnp.full((4, 2, 3), most, jnp.bfloat16))}
    peers = RoundPeers.synchronous(jnp.ones(4, jnp.int32))
    optimizer = distro(momentum)
    updates, _ = optimizer.receive(message, peers, params, optimizer.init(params)[1], jnp.int32(1))
    small = {"w": message["w"]._replace(value_NK=jnp.ones((4, 2, 3), jnp.bfloat16))}
    alike, _ = optimizer.receive(small, peers, params, optimizer.init(params)[1], jnp.int32(1))
    assert np.isfinite(updates["w"]).all()
    np.testing.assert_allclose(updates["w"], alike["w"], rtol=1e-5)
    whole = dct.aggregate_sent(index, message["w"].value_NK, jnp.ones(4, bool), CUT, mean)
    assert np.asarray(whole).max() == most
