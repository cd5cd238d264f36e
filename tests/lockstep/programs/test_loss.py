"""Cross-entropy, whole and in parts: values and gradients, and the memory that they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.programs import loss
from lockstep.programs.columns import UNCOUNTED, Columns

B, T, D, V = 3, 7, 8, 50
WEIGHTS = np.array([0.5, 0.3, 0.0], np.float32)  # the last sequence is padding


def drawn(dtype=np.float32):
    rng = np.random.default_rng(0)
    x_ND, kernel_DV = rng.normal(size=(B * T, D)), rng.normal(size=(D, V))
    tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    return jnp.asarray(x_ND, dtype), jnp.asarray(kernel_DV, jnp.float32), tokens_BT


def labels():
    """Labels that differ from the tokens, of which some count: none of the last row."""
    rng = np.random.default_rng(1)
    labels_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    labels_BT[rng.random((B, T)) < 0.4] = UNCOUNTED
    labels_BT[2] = UNCOUNTED
    labels_BT[2, 0] = 3  # which nothing predicts
    return labels_BT


def each(x_ND, kernel_DV, tokens_BT):
    """Each prediction's cross-entropy in float64, a token at a time: [B, T - 1]."""
    x_BTD = np.asarray(x_ND, np.float64).reshape(B, T, D)
    found = np.zeros((B, T - 1))
    for b, t in np.ndindex(B, T - 1):
        logits_V = x_BTD[b, t] @ np.asarray(kernel_DV, np.float64)
        share_V = np.exp(logits_V) / np.exp(logits_V).sum()
        found[b, t] = -np.log(share_V[max(tokens_BT[b, t + 1], 0)])
    return found


@pytest.fixture(params=["whole", 5 * V, V, 1], ids=["whole", "5 at a time", "1 at a time", "fewer"])
def parts(request, monkeypatch):
    """How many logits may be made at a time; 21 places are no multiple of 5."""
    if request.param != "whole":
        monkeypatch.setattr(loss, "LARGEST", request.param)


def test_each_sequence_has_the_mean_of_its_predictions(parts):
    found = jax.jit(loss.cross_entropy)(*drawn())
    np.testing.assert_allclose(found, each(*drawn()).mean(axis=1), rtol=1e-5)


def test_of_labels_the_mean_is_over_those_that_count(parts):
    x_ND, kernel_DV, tokens_BT = drawn()
    rows = Columns(jnp.asarray(tokens_BT), jnp.asarray(labels()))
    found = jax.jit(loss.measured)(x_ND, kernel_DV, rows)
    counted_BS = labels()[:, 1:] != UNCOUNTED
    losses_BS = np.where(counted_BS, each(x_ND, kernel_DV, labels()), 0)
    expected = losses_BS.sum(axis=1) / np.maximum(counted_BS.sum(axis=1), 1)
    assert expected[2] == 0 and 0 < counted_BS[0].sum() < T - 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_weights_of_predictions_take_the_place_of_those_of_sequences(parts):
    """The gradient, against float64: x of each place is moved by what it predicts."""
    x_ND, kernel_DV, _ = drawn()
    rows = Columns(None, jnp.asarray(labels()))
    counted_BS = labels()[:, 1:] != UNCOUNTED
    weight_BS = (counted_BS / counted_BS.sum()).astype(np.float32)

    def mine(x_ND, kernel_DV):
        return loss.weighted_cross_entropy(x_ND, kernel_DV, loss.targets(rows), weight_BS)

    value, (by_x, by_kernel) = jax.jit(jax.value_and_grad(mine, argnums=(0, 1)))(x_ND, kernel_DV)
    expected = (weight_BS * each(x_ND, kernel_DV, labels())).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    wide, kernel = np.asarray(x_ND, np.float64), np.asarray(kernel_DV, np.float64)
    share_NV = np.exp(wide @ kernel)
    share_NV /= share_NV.sum(axis=1, keepdims=True)
    slope_BTV = share_NV.reshape(B, T, V).copy()
    for b, t in np.ndindex(B, T - 1):
        slope_BTV[b, t, max(labels()[b, t + 1], 0)] -= 1
    slope_BTV *= np.pad(weight_BS, ((0, 0), (0, 1)))[..., None]
    slope_NV = slope_BTV.reshape(B * T, V)
    np.testing.assert_allclose(by_x, slope_NV @ kernel.T, atol=1e-6)
    np.testing.assert_allclose(by_kernel, wide.T @ slope_NV, atol=1e-6)


@pytest.mark.parametrize("at_once", [None, 1, 5, 12, 1000])
def test_gradients_are_those_of_the_whole(parts, at_once):
    x_ND, kernel_DV, tokens_BT = drawn()

    def plain(x_ND, kernel_DV):
        logits_BTV = (x_ND @ kernel_DV).reshape(B, T, V)
        chosen_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        label_BS = jnp.take_along_axis(chosen_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
        return -3.0 * (WEIGHTS * label_BS.mean(axis=1)).sum()

    def mine(x_ND, kernel_DV):  # times 3: what comes after the loss must reach the gradients
        value = loss.weighted_cross_entropy(x_ND, kernel_DV, tokens_BT, WEIGHTS, at_once)
        return 3.0 * value

    expected, found = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x_ND, kernel_DV) for f in (plain, mine)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[1], expected[1])


def test_in_bfloat16_the_kernels_gradient_is_added_up_in_float32(parts):
    x_ND, kernel_DV, tokens_BT = drawn(jnp.bfloat16)
    program = jax.grad(loss.weighted_cross_entropy, argnums=(0, 1))
    by_x, by_kernel = jax.jit(program)(x_ND, kernel_DV, tokens_BT, WEIGHTS)
    assert (by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    wide = x_ND.astype(jnp.float32), kernel_DV.astype(jnp.bfloat16).astype(jnp.float32)
    _, expected = jax.jit(program)(*wide, tokens_BT, WEIGHTS)
    np.testing.assert_allclose(by_kernel, expected, atol=0.01 * np.abs(expected).max())


def test_a_large_vocabulary_takes_an_eighth_of_the_memory_or_less(monkeypatch):
    """8,192 tokens of 128,000: as compiled, nothing runs."""
    shapes = (8 * 1024, 64), (64, 128_000)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments.append(jax.ShapeDtypeStruct((8, 1024), jnp.int32))
    arguments.append(jax.ShapeDtypeStruct((8,), jnp.float32))

    def peak() -> int:
        program = jax.value_and_grad(loss.weighted_cross_entropy, argnums=(0, 1))
        # a new function each time, or what was traced before would be taken
        compiled = jax.jit(lambda *a: program(*a)).lower(*arguments).compile()
        found = compiled.memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    in_parts = peak()
    monkeypatch.setattr(loss, "LARGEST", 2**40)
    assert in_parts * 8 <= peak()
