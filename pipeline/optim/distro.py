"""DisTrO: peers exchange a few DCT coefficients of their momentum, and step by the sign."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipeline.optim import dct
from pipeline.optim.optimizer import Optimizer, Schedule, Tree, clip, look_here


class Coefficients(NamedTuple):
    """What a peer sends of one parameter; N blocks, K coefficients of each.

    index_NK: places within the block, ascending; uint8, uint16 or uint32 by the block's area.
    value_NK: float32 coefficients, or bool "is negative" with `quantize_1bit`.
    """

    index_NK: jax.Array
    value_NK: jax.Array


def distro(
    learning_rate: Schedule,
    *,
    compression_decay: float,
    compression_topk: int,
    compression_chunk: int,
    quantize_1bit: bool,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    stacked: tuple[str, ...] = (),
) -> Optimizer:
    """DisTrO without overlap, which is DeMo's order: a round's messages are applied in that round.

    With g_p the (clipped) gradient of peer p at theta, and lr the learning rate of the step:

        delta_p <- compression_decay * delta_p + lr * g_p
        q_p      = top-k by magnitude of DCT(delta_p), per block
        delta_p <- delta_p - DCT^-1(q_p)
        Q        = mean over the peers that sent a coefficient, of q_p or of sign(q_p)
        theta   <- theta * (1 - lr * weight_decay) - lr * sign(DCT^-1(Q))

    The DCT is linear, so `delta` is kept as its coefficients: decay and gradient add up there, and
    removing q_p is setting zeros, exactly; no inverse transform is needed but the one of Q. A peer
    removes what it selected with full values, whatever bits the wire carries, as Psyche does.

    Args:
      learning_rate: schedule; step, the first is 1 -> learning rate. It scales the gradient on its
        way into `delta` as well as the step.
      compression_decay: of delta, per round, in [0, 1].
      compression_topk: coefficients sent of each block; all of a smaller block.
      compression_chunk: the longest side of a block; the largest divisor at most this is taken.
      quantize_1bit: send signs instead of float32 values.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of a peer's gradient; None or 0 for no clipping.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
    """

    def cut(path: tuple, leaf: jax.Array) -> dct.Layout:
        return dct.layout(leaf.shape, compression_chunk, stacked=path[0].key in stacked)

    def init(params: Tree) -> tuple[Tree, Tree]:
        def zeros(path: tuple, leaf: jax.Array) -> jax.Array:
            blocks = cut(path, leaf)
            return jnp.zeros((blocks.blocks, blocks.area), jnp.float32)

        return {"delta": jax.tree.map_with_path(zeros, params)}, {}

    def inner(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        del params
        rate = learning_rate(step)

        def accumulate(path: tuple, g: jax.Array, delta_NA: jax.Array) -> jax.Array:
            return compression_decay * delta_NA + rate * dct.encode(g, cut(path, g))

        grads = clip(grads, clip_grad_norm)
        return {"delta": jax.tree.map_with_path(accumulate, grads, own["delta"])}

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del params, shared, step
        leaves, structure = jax.tree.flatten(own["delta"])
        picked = [_select(delta_NA, compression_topk, quantize_1bit) for delta_NA in leaves]
        messages, rests = zip(*picked, strict=True)
        return structure.unflatten(messages), {"delta": structure.unflatten(rests)}

    def receive(
        messages: Tree, present: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        rate = learning_rate(step)

        def update(path: tuple, theta: jax.Array, message: Coefficients) -> jax.Array:
            index_PNK, value_PNK = message
            if quantize_1bit:
                value_PNK = jnp.where(value_PNK, -1.0, 1.0)
            blocks = cut(path, theta)
            mean_NA = dct.mean_of_senders(index_PNK, value_PNK, present, blocks.area)
            direction = jnp.sign(dct.decode(mean_NA, blocks))
            return -rate * (direction + weight_decay * theta)

        return jax.tree.map_with_path(update, params, messages), shared

    def compare(own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        leaves, structure = jax.tree.flatten(own["delta"])
        sent = structure.flatten_up_to(message)
        found = [_compare(delta_NA, *pair) for delta_NA, pair in zip(leaves, sent, strict=True)]
        distances, rests = zip(*found, strict=True)
        return jnp.max(jnp.stack(distances)), {"delta": structure.unflatten(rests)}

    return Optimizer(init, look_here, inner, send, receive, compare)


def _select(delta_NA: jax.Array, topk: int, quantize_1bit: bool) -> tuple[Coefficients, jax.Array]:
    """What is sent of a parameter, and what is left of its delta."""
    index_NK, value_NK = dct.top_k(delta_NA, topk)
    narrow = index_NK.astype(dct.index_dtype(delta_NA.shape[1]))
    # Psyche's sign bit: -0.0 is negative, 0.0 is not
    message = Coefficients(narrow, jnp.signbit(value_NK) if quantize_1bit else value_NK)
    return message, dct.remove(delta_NA, index_NK)


def _compare(
    delta_NA: jax.Array, index_NK: jax.Array, value_NK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How far a sent message is from what this delta would send, and the delta after that message.

    The distance is the largest of: how far below the block's k-th magnitude a sent place lies; and
    the share of the k-th magnitude by which a value, or a value of the other sign, is off.
    """
    index_NK = index_NK.astype(jnp.int32)
    kth_N1 = jax.lax.top_k(jnp.abs(delta_NA), index_NK.shape[1])[0][:, -1:]
    mine_NK = jnp.take_along_axis(delta_NA, index_NK, axis=-1)
    below_NK = kth_N1 - jnp.abs(mine_NK)
    if value_NK.dtype == bool:
        off_NK = jnp.where(value_NK == jnp.signbit(mine_NK), 0.0, jnp.abs(mine_NK))
    else:
        off_NK = jnp.abs(value_NK - mine_NK)
    # a block that is all but zero holds rounding only: its places say nothing
    floor = 1e-6 * jnp.max(jnp.abs(delta_NA)) + jnp.finfo(jnp.float32).tiny
    distance = jnp.max(jnp.maximum(below_NK, off_NK) / jnp.maximum(kth_N1, floor))
    return distance, dct.remove(delta_NA, index_NK)
