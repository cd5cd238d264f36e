"""A mixture of experts: a router chooses some MLPs for each token, and no token is dropped.

Shapes in names: N tokens, D their width, E experts, A experts that each token gets, C = N * A
choices, R rows of the choices sorted by expert, b blocks of s rows, F the experts' inner width.

A config is asked for: hidden_size, moe_intermediate_size, n_routed_experts, n_shared_experts,
num_experts_per_tok, routed_scaling_factor, initializer_range, mlp_bias, `routing`, and `corrected`,
whether the router's choice is corrected.

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
    """How a router chooses.

    groups: how many groups the experts are in.
    limit: how many of them are open to a token: those that are worth most.
    best: a group is worth the sum of its so many best experts.
    scores: of logits; "sigmoid" or "softmax".
    normalised: whether the chosen experts' scores are divided by their sum.
    """

    groups: int
    limit: int
    best: int
    scores: str
    normalised: bool


class Router(nnx.Module):
    """Gives each token A of the E experts, and a weight for each; all in float32.

    The correction shifts which experts are chosen and not their weights, so it has no gradient:
    DeepSeek moves it by how loaded an expert is. In the place of a gradient it has that load, how
    many choices fell on each expert (`_reporting`).
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
        """Returns the weights and the experts' numbers, [N, A] each."""
        routing = self.routing
        # no TensorFloat32: a rounded score is another expert
        logits_NE = jnp.dot(
            x_ND.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST
        )
        scored = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax}[routing.scores]
        scores_NE = scored(logits_NE)
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
    """Returns the weights; the correction's gradient is each expert's number of choices.

    Only tokens that the loss depends on count: those of a sequence that fills up a batch, and the
    last of each sequence, have no gradient.
    """
    return weights_NA


def _reporting_forward(
    weights_NA: jax.Array, experts_NA: jax.Array, correction_E: jax.Array
) -> tuple[jax.Array, tuple]:
    return weights_NA, (experts_NA, correction_E)


def _reporting_backward(kept: tuple, g_NA: jax.Array) -> tuple:
    experts_NA, correction_E = kept
    counts_N = jnp.any(g_NA != 0, axis=-1)
    chosen_NAE = jax.nn.one_hot(experts_NA, correction_E.size, dtype=correction_E.dtype)
    return g_NA, None, jnp.sum(chosen_NAE * counts_N[:, None, None], axis=(0, 1))


_reporting.defvjp(_reporting_forward, _reporting_backward)


def _within_best_groups(choice_NE: jax.Array, routing: Routing) -> jax.Array:
    """Puts the experts of all groups but the best below any other."""
    choice_NGe = choice_NE.reshape(choice_NE.shape[0], routing.groups, -1)
    worth_NG = lax.top_k(choice_NGe, routing.best)[0].sum(axis=-1)
    _, best_Ng = lax.top_k(worth_NG, routing.limit)
    open_NG = jax.nn.one_hot(best_Ng, routing.groups, dtype=jnp.bool).any(axis=1)
    return jnp.where(open_NG[:, :, None], choice_NGe, -jnp.inf).reshape(choice_NE.shape)


class Experts(nnx.Module):
    """E gated MLPs, of which each token passes through its own A; none is dropped.

    The choices are sorted by expert into blocks of rows that belong to one expert each, the last of
    an expert filled up. How many blocks there are does not depend on what was chosen, so shapes are
    static, and less than twice the work is done. On a CPU, with 2 experts of 16 for a token, a
    gradient took a third of the time of all experts on all tokens, and a tenth of that of
    `lax.ragged_dot`, which there computes them all, too.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        std, width, inner = (
            config.initializer_range,
            config.hidden_size,
            config.moe_intermediate_size,
        )

        def kernels(width_in: int, width_out: int) -> nnx.Param:
            shape = config.n_routed_experts, width_in, width_out
            return nnx.Param(std * jax.random.normal(rngs.params(), shape))

        self.gate, self.up = kernels(width, inner), kernels(width, inner)
        self.down = kernels(inner, width)

    def __call__(self, x_ND: jax.Array, weights_NA: jax.Array, experts_NA: jax.Array) -> jax.Array:
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
    """Where each choice lies, and what lies where.

    row_C: the row of a choice.
    choice_R: the choice in a row; C where there is none.
    expert_b: the expert of a block of rows.
    """

    row_C: jax.Array
    choice_R: jax.Array
    expert_b: jax.Array


def _sort(expert_C: jax.Array, experts: int) -> tuple[_Rows, int]:
    """Sorts choices by expert, and returns where they go and how many rows a block has.

    A block has the largest power of two below the rows that an expert gets on average: larger ones
    are filled less, smaller ones read an expert's kernels more often.
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
    expert_b = jnp.minimum(expert_b, experts - 1)  # blocks that are not needed
    expert_R = jnp.repeat(expert_b, size)
    nth_R = jnp.arange(blocks * size) - first_row_E[expert_R]
    there_R = order_C[jnp.minimum(starts_E[expert_R] + nth_R, C - 1)]
    choice_R = jnp.where(nth_R < counts_E[expert_R], there_R, C)
    return _Rows(row_C, choice_R, expert_b), size


@jax.custom_vjp
def _move(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Returns x[source], with zeros where source is out of range.

    Its gradient is the same in the other direction, and not a scatter: slow on a CPU, and on a GPU
    a sum in any order.

    Args:
      x: [m, D].
      source: [n]; the row of x that a row of the result has.
      target: [m]; the row of the result that a row of x goes to, or out of range.
    """
    return x.at[source].get(mode="fill", fill_value=0)


def _move_forward(x: jax.Array, source: jax.Array, target: jax.Array) -> tuple:
    return _move(x, source, target), (source, target)


def _move_backward(places: tuple, g: jax.Array) -> tuple:
    source, target = places
    return _move(g, target, source), None, None


_move.defvjp(_move_forward, _move_backward)


@jax.custom_vjp
def _product(x_bsi: jax.Array, kernels_Eio: jax.Array, expert_b: jax.Array) -> jax.Array:
    """Multiplies each block with its expert's kernel.

    Its gradient takes the kernels by block once more, rather than keep a copy of them for each
    block from the forward pass on.
    """
    return jnp.matmul(x_bsi, kernels_Eio[expert_b])


def _product_forward(x_bsi: jax.Array, kernels_Eio: jax.Array, expert_b: jax.Array) -> tuple:
    return _product(x_bsi, kernels_Eio, expert_b), (x_bsi, kernels_Eio, expert_b)


def _product_backward(kept: tuple, g_bso: jax.Array) -> tuple:
    x_bsi, kernels_Eio, expert_b = kept
    g_bsi = jnp.matmul(g_bso, kernels_Eio[expert_b].swapaxes(1, 2))
    g_bio = jnp.matmul(x_bsi.swapaxes(1, 2), g_bso)
    count = kernels_Eio.shape[0]
    g_Eio = jax.ops.segment_sum(g_bio, expert_b, count, indices_are_sorted=True)
    return g_bsi, g_Eio, None


_product.defvjp(_product_forward, _product_backward)


class Mixture(nnx.Module):
    """The experts that the router chooses, and an MLP that every token passes through."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared = MLP(width, shared, std=std, bias=config.mlp_bias, rngs=rngs)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        return self.experts(x_ND, *self.router(x_ND)) + self.shared(x_ND)
