"""What updates become: against singular values, and where there is nothing to say."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim import directions


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (3, 16, 12)])
def test_orthogonal_keeps_the_singular_vectors_and_levels_the_values(shape):
    x = np.random.default_rng(0).normal(size=shape)
    found = np.asarray(directions.orthogonal(jnp.asarray(x, jnp.float32)), np.float64)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    inside = np.swapaxes(left, -1, -2) @ found @ np.swapaxes(right, -1, -2)
    levels = np.diagonal(inside, axis1=-2, axis2=-1)
    # the square matrix drawn here has a singular value of 1/80 of the largest; five steps reach it
    assert levels.min() > 0.5 * max(shape[-2:]) ** 0.5
    assert levels.max() < 1.25 * max(shape[-2:]) ** 0.5
    off = inside - levels[..., None] * np.eye(levels.shape[-1])
    np.testing.assert_allclose(off, 0, atol=1e-3)


def test_rms_has_a_root_mean_square_of_one():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    found = directions.rms(x)
    assert float(jnp.mean(found**2)) == pytest.approx(1, rel=1e-6)
    np.testing.assert_allclose(found / found[0, 0], x / x[0, 0], rtol=1e-5)


@pytest.mark.parametrize("name", directions.BY_NAME)
def test_zeros_stay_zeros(name):
    np.testing.assert_array_equal(directions.BY_NAME[name](jnp.zeros((4, 6))), 0)
