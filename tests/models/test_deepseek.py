"""DeepSeek: its router and its experts; test_parity.py has it beside PyTorch's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import experts
from models.deepseek_v3 import deepseek_v3
from tests.models.reference import BASE, GROUPS, LATENT

CONFIG = deepseek_v3.Config.from_hf(BASE | LATENT | GROUPS)


# ---- The router ----


def router(correction, kernel=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    made = experts.Router(config, rngs=nnx.Rngs(0))
    made.correction[...] = jnp.asarray(correction, jnp.float32)
    made.kernel[...] = jnp.zeros_like(made.kernel[...]) if kernel is None else kernel
    return made


def test_equal_scores_choose_the_first_groups_and_experts():
    x_ND = jnp.ones((3, 32))
    _, experts_NA = router(np.zeros(8))(x_ND)
    np.testing.assert_array_equal(experts_NA, [[0, 1, 2]] * 3)
    _, experts_NA = router([0, 0, 0, 0, 1, 1, 1, 1])(x_ND)
    np.testing.assert_array_equal(experts_NA, [[4, 5, 6]] * 3)


def test_the_correction_chooses_in_float32_and_is_no_part_of_the_weights():
    correction = [0, 0, 1, 1 + 2**-12, 0, 0, 0, 0]
    chosen = router(correction, num_experts_per_tok=1, norm_topk_prob=False)
    weights_NA, experts_NA = chosen(jnp.ones((2, 32), jnp.bfloat16))
    np.testing.assert_array_equal(experts_NA, [[3], [3]])  # rounded to bfloat16: 2, the first
    np.testing.assert_allclose(weights_NA, 0.5 * 1.7, rtol=1e-6)
    assert weights_NA.dtype == jnp.float32


def test_a_router_scores_in_float32():
    """Two experts whose scores bfloat16 cannot tell apart."""
    kernel = np.zeros((32, 8), np.float32)
    kernel[0, 5:7] = 1, 1 + 2**-12
    chosen = router(np.zeros(8), kernel, num_experts_per_tok=1, n_group=1, topk_group=1)
    _, experts_NA = chosen(jnp.ones((2, 32), jnp.bfloat16))
    np.testing.assert_array_equal(experts_NA, [[6], [6]])


def test_only_the_best_groups_are_open():
    """The best expert of all stands in a group that is worth less: two of its own count."""
    correction = [9, -9, 2, 2, 1, 1, 0, 0]
    _, experts_NA = router(correction)(jnp.ones((1, 32)))
    np.testing.assert_array_equal(experts_NA, [[2, 3, 4]])


# ---- The experts ----


def experts_one_by_one(x_ND, weights_NA, experts_NA, gate, up, down):
    """Every expert on every token, weighted."""
    total = 0.0
    for e in range(gate.shape[0]):
        share_N = jnp.where(experts_NA == e, weights_NA, 0).sum(axis=1)
        inner = jax.nn.silu(x_ND @ gate[e]) * (x_ND @ up[e])
        total += share_N[:, None] * (inner @ down[e])
    return total


CHOICES = {
    "any": lambda rng, N: np.stack([rng.permutation(8)[:3] for _ in range(N)]),
    "the same for all": lambda rng, N: np.tile([7, 0, 3], (N, 1)),
    "one expert three times": lambda rng, N: np.full((N, 3), 5),
}


@pytest.mark.parametrize("tokens", [1, 2, 7, 90])
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_no_token_is_dropped_however_they_choose(choose, tokens):
    rng = np.random.default_rng(tokens)
    made = experts.Experts(CONFIG, rngs=nnx.Rngs(0))
    graph = nnx.graphdef(made)
    x_ND = jnp.asarray(rng.normal(size=(tokens, 32)), jnp.float32)
    weights_NA = jnp.asarray(rng.uniform(size=(tokens, 3)), jnp.float32)
    experts_NA = jnp.asarray(choose(rng, tokens))
    names = "gate", "up", "down"
    kernels = {name: 10 * getattr(made, name)[...] for name in names}
    out = jnp.asarray(rng.normal(size=(tokens, 32)), jnp.float32)

    def ours(x_ND, weights_NA, kernels, experts_NA, out):
        return (nnx.merge(graph, kernels)(x_ND, weights_NA, experts_NA) * out).sum()

    def plain(x_ND, weights_NA, kernels, experts_NA, out):
        return (experts_one_by_one(x_ND, weights_NA, experts_NA, **kernels) * out).sum()

    arguments = x_ND, weights_NA, kernels, experts_NA, out  # a program for each number of tokens
    found, expected = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*arguments))
        for f in (ours, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


def test_the_rows_of_sorted_choices_are_less_than_twice_as_many():
    for count, among in ((1, 8), (8, 8), (9, 8), (111, 8), (1024, 16), (3072, 64), (5, 256)):
        rows, size = jax.jit(experts._sort, static_argnums=1)(jnp.zeros(count, jnp.int32), among)
        assert rows.choice_R.shape[0] == rows.expert_b.shape[0] * size
        assert count <= rows.choice_R.shape[0] < 2 * count or count == 1
        held = np.asarray(rows.choice_R)
        assert sorted(held[held < count]) == list(range(count))
        np.testing.assert_array_equal(held[np.asarray(rows.row_C)], np.arange(count))
