"""A mixture of experts: a router chooses some MLPs for each token, and no token is dropped.

Shapes in names: N tokens, D their width, E experts, A experts that each token gets, C = N * A
choices, R rows of the choices sorted by expert, b blocks of s rows, F the experts' inner width.

The config is a `models.deepseek_v3.DeepseekConfig`.

References:
  DeepSeek-AI, DeepSeek-V3, https://arxiv.org/abs/2412.19437
  Gale et al., MegaBlocks, https://arxiv.org/abs/2211.15841
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.parts import MLP


class Routing(NamedTuple):
    """How a router chooses experts."""

    groups: int
    """Number of groups of experts."""
    limit: int
    """Number of groups that a token chooses from: those with the highest scores."""
    best: int
    """Number of a group's best experts whose scores add up to the group's score."""
    scores: str
    """Function from logits to scores: "sigmoid" or "softmax"."""
    normalised: bool
    """Whether the chosen experts' scores are divided by their sum."""


class Router(nnx.Module):
    """Gives each token A of the E experts, and a weight for each; all in float32.

    The correction changes which experts are chosen but not their weights, so it has no gradient:
    DeepSeek moves it by the load of each expert. In place of a gradient it gets that load, the
    number of choices that fell on each expert (`_reporting`).
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        shape = config.hidden_size, config.n_routed_experts
        self.kernel = nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), shape))
        if config.corrected:
            self.correction = nnx.Param(jnp.zeros(config.n_routed_experts))
        self.corrected = config.corrected
        self.routing = config.routing
        self.chosen = config.num_experts_per_tok
        self.factor = config.routed_scaling_factor

    def __call__(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights and the indices of the experts, [N, A] each."""
        routing = self.routing
        # no TensorFloat32: rounded scores would choose other experts
        logits_NE = jnp.dot(
            x_ND.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST
        )
        score = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax}[routing.scores]
        scores_NE = score(logits_NE)
        choice_NE = lax.stop_gradient(scores_NE)
        if self.corrected:
            choice_NE += lax.stop_gradient(self.correction[...])
        if routing.limit < routing.groups:
            choice_NE = _within_best_groups(choice_NE, routing)
        _, experts_NA = lax.top_k(choice_NE, self.chosen)  # of equal ones, the first
        chosen_NAE = jax.nn.one_hot(experts_NA, scores_NE.shape[1], dtype=jnp.float32)
        # a product with one-hots, since the gradient of a gather would be a scatter
        weights_NA = jnp.sum(chosen_NAE * scores_NE[:, None], axis=-1)
        if routing.normalised:
            weights_NA /= weights_NA.sum(axis=-1, keepdims=True) + 1e-20
        if self.corrected:
            weights_NA = _reporting(weights_NA, experts_NA, self.correction[...])
        return weights_NA * self.factor, experts_NA


@jax.custom_vjp
def _reporting(weights_NA: jax.Array, experts_NA: jax.Array, correction_E: jax.Array) -> jax.Array:
    """Return experts' weights; the correction's gradient is each expert's number of choices.

    Only tokens that the loss depends on count: padding sequences and the last token of each
    sequence have no gradient.
    """
    return weights_NA


def _reporting_backward(saved: tuple, g_NA: jax.Array) -> tuple:
    experts_NA, correction_E = saved
    counts_N = jnp.any(g_NA != 0, axis=-1)
    chosen_NAE = jax.nn.one_hot(experts_NA, correction_E.size, dtype=correction_E.dtype)
    return g_NA, None, jnp.sum(chosen_NAE * counts_N[:, None, None], axis=(0, 1))


_reporting.defvjp(lambda weights_NA, *rest: (weights_NA, rest), _reporting_backward)


def _within_best_groups(choice_NE: jax.Array, routing: Routing) -> jax.Array:
    """Put the experts of all groups but the best below all others."""
    choice_NGe = choice_NE.reshape(choice_NE.shape[0], routing.groups, -1)
    score_NG = lax.top_k(choice_NGe, routing.best)[0].sum(axis=-1)
    _, best_Ng = lax.top_k(score_NG, routing.limit)
    open_NG = jax.nn.one_hot(best_Ng, routing.groups, dtype=jnp.bool).any(axis=1)
    return jnp.where(open_NG[:, :, None], choice_NGe, -jnp.inf).reshape(choice_NE.shape)


class Experts(nnx.Module):
    """E gated MLPs, of which each token passes through its own A; no token is dropped.

    Choices are sorted by expert into blocks of rows, each block of one expert, the last of an
    expert padded. The number of blocks does not depend on the choices, so shapes are static, and
    less than twice the work is done. On a CPU, with 2 experts of 16 for a token, a gradient took a
    third of the time of all experts on all tokens, and a tenth of that of `lax.ragged_dot`, which
    computes them all there, too.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        std = config.initializer_range
        width, inner = config.hidden_size, config.moe_intermediate_size

        def kernels(width_in: int, width_out: int) -> nnx.Param:
            shape = config.n_routed_experts, width_in, width_out
            return nnx.Param(std * jax.random.normal(rngs.params(), shape))

        self.gate, self.up = kernels(width, inner), kernels(width, inner)
        self.down = kernels(inner, width)

    def __call__(self, x_ND: jax.Array, weights_NA: jax.Array, experts_NA: jax.Array) -> jax.Array:
        """Return the weighted sum of the chosen experts' outputs, [N, D]."""
        (N, D), A, dtype = x_ND.shape, experts_NA.shape[1], x_ND.dtype
        count = self.gate.shape[0]
        rows, size = _sort(experts_NA.reshape(N * A), count)
        x_CD = jnp.repeat(x_ND, A, axis=0)
        x_bsD = _move(x_CD, rows.choice_R, rows.row_C).reshape(-1, size, D)

        def product(x_bsi: jax.Array, kernels: nnx.Param) -> jax.Array:
            return _product(x_bsi, kernels[...].astype(dtype), rows.expert_b)

        inner_bsF = jax.nn.silu(product(x_bsD, self.gate)) * product(x_bsD, self.up)
        y_RD = product(inner_bsF, self.down).reshape(-1, D)
        y_NAD = _move(y_RD, rows.row_C, rows.choice_R).reshape(N, A, D)
        return jnp.sum(y_NAD * weights_NA[:, :, None], axis=1).astype(dtype)  # summed in float32


class _Rows(NamedTuple):
    """Which choice of an expert lies in which row."""

    row_C: jax.Array
    """Row of each choice."""
    choice_R: jax.Array
    """Choice in each row; C in padding."""
    expert_b: jax.Array
    """Expert of each block of rows."""


def _sort(expert_C: jax.Array, experts: int) -> tuple[_Rows, int]:
    """Sort choices by expert; return their rows, and the number of rows in an expert's block.

    A block has the largest power of two below the rows that an expert gets on average: larger
    blocks have more padding, smaller ones read an expert's kernels more often.
    """
    C = expert_C.shape[0]
    size = 1 << max(0, (-(-C // experts) - 1).bit_length() - 1)
    blocks = (C + experts * (size - 1)) // size  # enough, however the choices fall

    order_C = jnp.argsort(expert_C, stable=True)
    rank_C = jnp.argsort(order_C)
    counts_E = jax.nn.one_hot(expert_C, experts, dtype=jnp.int32).sum(axis=0)
    starts_E = jnp.cumsum(counts_E) - counts_E  # of an expert's choices, in their order
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E)
    first_row_E = (ends_E - blocks_E) * size

    row_C = rank_C - starts_E[expert_C] + first_row_E[expert_C]
    expert_b = (jnp.arange(blocks)[:, None] >= ends_E).sum(axis=1)
    expert_b = jnp.minimum(expert_b, experts - 1)  # blocks that stay empty
    expert_R = jnp.repeat(expert_b, size)
    nth_R = jnp.arange(blocks * size) - first_row_E[expert_R]
    sorted_R = order_C[jnp.minimum(starts_E[expert_R] + nth_R, C - 1)]
    choice_R = jnp.where(nth_R < counts_E[expert_R], sorted_R, C)
    return _Rows(row_C, choice_R, expert_b), size


@jax.custom_vjp
def _move(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Return x[source], to and from the experts, with zeros where source is out of range.

    Its gradient is the same in the other direction instead of a scatter, which is slow on a CPU and
    sums in any order on a GPU.

    Args:
      x: Rows to move, [m, D].
      source: Row of x that each row of the result has, [n].
      target: Row of the result that each row of x goes to, or out of range, [m].
    """
    return x.at[source].get(mode="fill", fill_value=0)


def _move_backward(saved: tuple, g: jax.Array) -> tuple:
    source, target = saved
    return _move(g, target, source), None, None


_move.defvjp(lambda x, *places: (_move(x, *places), places), _move_backward)


@jax.custom_vjp
def _product(x_bsi: jax.Array, kernels_Eio: jax.Array, expert_b: jax.Array) -> jax.Array:
    """Multiply each block with its expert's kernel.

    The backward pass gathers the kernels by block again, rather than keep a copy of them for each
    block from the forward pass.
    """
    return jnp.matmul(x_bsi, kernels_Eio[expert_b])


def _product_backward(saved: tuple, g_bso: jax.Array) -> tuple:
    x_bsi, kernels_Eio, expert_b = saved
    g_bsi = jnp.matmul(g_bso, kernels_Eio[expert_b].swapaxes(1, 2))
    g_bio = jnp.matmul(x_bsi.swapaxes(1, 2), g_bso)
    count = kernels_Eio.shape[0]
    g_Eio = jax.ops.segment_sum(g_bio, expert_b, count, indices_are_sorted=True)
    return g_bsi, g_Eio, None


_product.defvjp(lambda *operands: (_product(*operands), operands), _product_backward)


class Mixture(nnx.Module):
    """The experts that the router chooses, and a shared MLP that every token passes through."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared = MLP(width, shared, std=std, bias=config.mlp_bias, rngs=rngs)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        """Return the sum of the chosen and the shared experts' outputs, [N, D]."""
        return self.experts(x_ND, *self.router(x_ND)) + self.shared(x_ND)
