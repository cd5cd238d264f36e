"""The chunked DCT: orthonormal, invertible, and top-k that everybody finds alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import fft

from lockstep.optim.aggregation import mean
from lockstep.optim.compressed import dct
from tests.lockstep.optim.compressed.reference import blocks_of, top

encode, decode, take, remove = (
    jax.jit(function, static_argnums=1)
    for function in (dct.encode, dct.decode, dct.take, dct.remove)
)
top_k = jax.jit(dct.top_k, static_argnums=(1, 2))
norm = np.linalg.norm
SHAPES = [(7,), (64,), (100,), (128, 352), (4, 128, 128), (3, 97, 10), (12, 1), ()]


def test_an_element_that_no_coefficient_reaches_takes_no_step():
    """Cosines are 0 at odd multiples of a right angle, which blocks with an odd factor have."""
    for n in range(1, 100):
        odd = [[(2 * i + 1) * k % (2 * n) == n for i in range(n)] for k in range(n)]
        np.testing.assert_array_equal(dct.basis(n) == 0, odd)
    cut = dct.layout((3,), 64)
    np.testing.assert_array_equal(np.sign(decode(jnp.array([0.0, 1.0, 0.0]), cut)), [1, 0, -1])


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_inverts_encode_and_keeps_the_norm(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    cut = dct.layout(shape, 64)
    coefficients = encode(x, cut)
    assert coefficients.shape == x.shape
    np.testing.assert_allclose(decode(coefficients, cut), x, atol=2e-5)
    np.testing.assert_allclose(norm(coefficients), norm(x), rtol=1e-5)


def test_stacked_vectors_are_cut_layer_by_layer():
    x = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    cut = dct.layout(x.shape, 64, stacked=True)
    assert (cut.blocks, cut.area) == (8, 64)
    expected = fft.dct(x.reshape(8, 64), norm="ortho")
    np.testing.assert_allclose(encode(x, cut), expected.reshape(x.shape), atol=1e-5)


@pytest.mark.parametrize("shape, chunk", [((128, 192), 64), ((3, 40, 29), 64), ((256,), 64)])
@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_top_k_in_steps_is_a_stable_sort_of_each_block(shape, chunk, k, levels):
    rng = np.random.default_rng(k)
    x = np.round(rng.normal(size=shape) * levels).astype(np.float32)  # few levels: many ties
    cut = dct.layout(shape, chunk)
    index_NK, value_NK = top_k(jnp.asarray(x), cut, k)
    for number, block in enumerate(blocks_of(shape, chunk)):
        expected = top(x[block].ravel(), min(k, cut.area))
        assert np.asarray(index_NK[number]).tolist() == expected.tolist()
        np.testing.assert_array_equal(value_NK[number], x[block].ravel()[expected])


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_taken_is_what_is_removed(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    cut = dct.layout(shape, 64)
    index_NK, value_NK = top_k(x, cut, 5)
    np.testing.assert_array_equal(take(x, cut, index_NK), value_NK)
    rest = remove(x, cut, index_NK)
    assert np.sum(rest != x) == index_NK.size
    assert np.all(take(rest, cut, index_NK) == 0)


def test_mean_counts_present_senders_only():
    index_PNK = jnp.array([[[0, 1]], [[1, 3]], [[1, 2]]], jnp.uint8)
    value_PNK = jnp.array([[[4.0, 2.0]], [[6.0, 5.0]], [[jnp.nan, 9.0]]])
    present_P = jnp.array([True, True, False])
    aggregate_sent = jax.jit(dct.aggregate_sent, static_argnums=(3, 4))
    for aggregate in (mean, lambda values, weight: mean(values, weight)):  # the second has no name
        found = aggregate_sent(index_PNK, value_PNK, present_P, dct.layout((5,), 5), aggregate)
        assert found.tolist() == [4.0, 4.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize(
    "area, dtype", [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_places_take_the_narrowest_integer(area, dtype):
    assert dct.index_dtype(area) == dtype
