"""Sums of the gradient of an embedding in order: against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.rows_of_table import sums_by_token

RNG = np.random.default_rng(0)
TOKENS = {  # (size of the vocabulary, tokens); a block has 128
    "fewer than a block": (100, RNG.integers(0, 100, 5)),
    "no multiple of a block": (50, RNG.integers(0, 50, 300)),
    "one token in all blocks": (3, np.full(512, 2)),
    "a few in many blocks": (7, RNG.integers(0, 7, 1024)),
    "most of them rare": (9000, np.minimum(RNG.zipf(1.3, 1000), 9000) - 1),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", TOKENS)
def test_rows_of_equal_tokens_are_summed(dtype, case):
    size, tokens_N = TOKENS[case]
    grad_ND = jnp.asarray(RNG.normal(size=(len(tokens_N), 8)), dtype)
    expected = np.zeros((size, 8))
    np.add.at(expected, tokens_N, np.asarray(grad_ND, np.float64))
    found = jax.jit(sums_by_token, static_argnums=2)(tokens_N.astype(np.int32), grad_ND, size)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
