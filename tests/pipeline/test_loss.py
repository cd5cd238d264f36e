"""Cross-entropy, whole and in parts: values and gradients, and the memory that they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import loss

B, T, D, V = 3, 7, 8, 50
WEIGHTS = np.array([0.5, 0.3, 0.0], np.float32)  # the last sequence is padding


def drawn(dtype=np.float32):
    rng = np.random.default_rng(0)
    x_ND, kernel_DV = rng.normal(size=(B * T, D)), rng.normal(size=(D, V))
    tokens_BT = rng.integers(0, V, (B, T)).astype(np.int32)
    return jnp.asarray(x_ND, dtype), jnp.asarray(kernel_DV, jnp.float32), tokens_BT


def reference(x_ND, kernel_DV, tokens_BT):
    """Float64, a token at a time."""
    x_BTD = np.asarray(x_ND, np.float64).reshape(B, T, D)
    found = np.zeros((B, T - 1))
    for b, t in np.ndindex(B, T - 1):
        logits_V = x_BTD[b, t] @ np.asarray(kernel_DV, np.float64)
        share_V = np.exp(logits_V) / np.exp(logits_V).sum()
        found[b, t] = -np.log(share_V[tokens_BT[b, t + 1]])
    return found.mean(axis=1)


@pytest.fixture(params=["whole", 5 * V, V, 1], ids=["whole", "5 at a time", "1 at a time", "fewer"])
def parts(request, monkeypatch):
    """How many logits may be made at a time; 21 places are no multiple of 5."""
    if request.param != "whole":
        monkeypatch.setattr(loss, "LARGEST", request.param)


def test_each_sequence_has_the_mean_of_its_predictions(parts):
    found = jax.jit(loss.cross_entropy)(*drawn())
    np.testing.assert_allclose(found, reference(*drawn()), rtol=1e-5)


def test_gradients_are_those_of_the_whole(parts):
    x_ND, kernel_DV, tokens_BT = drawn()

    def plain(x_ND, kernel_DV):
        logits_BTV = (x_ND @ kernel_DV).reshape(B, T, V)
        chosen_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        label_BS = jnp.take_along_axis(chosen_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
        return -3.0 * (WEIGHTS * label_BS.mean(axis=1)).sum()

    def mine(x_ND, kernel_DV):  # times 3: what comes after the loss must reach the gradients
        return 3.0 * loss.weighted_cross_entropy(x_ND, kernel_DV, tokens_BT, WEIGHTS)

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
