"""DisTrO: peers exchange a few DCT coefficients of their momentum, and step by the sign."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipeline.optim import dct, direction
from pipeline.optim.optimizer import Optimizer, Rate, Tree, clip_scale, group_of, no_lookahead, rate


class Coefficients(NamedTuple):
    """What a peer sends of one parameter; N blocks, K coefficients of each.

    index_NK: places within the block, ascending; uint8, uint16 or uint32 by the block's area.
    value_NK: coefficients, or bool "is negative" with `quantize_1bit`.
    """

    index_NK: jax.Array
    value_NK: jax.Array


def distro(
    learning_rate: Rate,
    *,
    compression_decay: float,
    compression_topk: int,
    compression_chunk: int,
    quantize_1bit: bool,
    value_dtype: jax.typing.DTypeLike = jnp.float32,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    overlap: int = 0,
    stacked: tuple[str, ...] = (),
    removed: float = 1.0,
    update: str = "sign",
    step_scale: Mapping[str, float] = MappingProxyType({}),
    topk_of: Mapping[str, int] = MappingProxyType({}),
    untransformed: Collection[str] = (),
) -> Optimizer:
    """DisTrO, in DeMo's order or, with overlap, in Psyche's.

    With g_p the (clipped) gradient of peer p, lr(t) the learning rate of step t, and
    D(.) the inverse DCT, per block:

        q_p(t) = top-k by magnitude of DCT(delta_p)
        Q(t)   = mean over the peers that sent a coefficient, of q_p(t) or of sign(q_p(t))

    overlap 0, DeMo: a round's messages are applied in that round.

        g_p at theta
        delta_p <- compression_decay * delta_p + lr(t) * g_p;  send q_p(t);  delta_p -= D(q_p(t))
        theta   <- theta * (1 - lr(t) * weight_decay) - lr(t) * sign(D(Q(t)))

    overlap 1, Psyche's `train` example, and 2, Psyche's network: messages travel while the next
    round is computed. A peer takes its gradient where its own delta says that params will be, and
    removes what it sent a round later, all of it before decay as Psyche's `generate` does:

        g_p at theta - lr(t-1) * sign(delta_p)
        delta_p <- compression_decay * (delta_p - D(q_p(t-1))) + lr(t) * g_p;  send q_p(t)
        theta   <- theta * (1 - lr(t) * weight_decay) - lr(s) * sign(D(Q(t-1)))

    with s = t for overlap 1, which applies Q(t-1) at the end of round t, and s = t + 1 for 2,
    which applies it as round t + 1 begins. So both train round t on params that know of Q up to
    t - 2, and differ only in the learning rate of a step. The last round's Q is lost, as in Psyche.

    The DCT is linear, so `delta` is kept as its coefficients: decay and gradient add up there, and
    removing q_p is setting zeros, exactly; no inverse transform is needed but the one of Q and,
    with overlap, of the lookahead. A peer removes what it selected with full values, whatever bits
    the wire carries, as Psyche does.

    Args:
      learning_rate: of a step, the first is 1; or a number. It scales the gradient on its way into
        `delta` as well as the step.
      compression_decay: of delta, per round, in [0, 1].
      compression_topk: coefficients sent of each block; all of a smaller block.
      compression_chunk: the longest side of a block; the largest divisor at most this is taken.
      quantize_1bit: send signs instead of values.
      value_dtype: what values are rounded to before they are sent.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of a peer's gradient; None or 0 for no clipping.
      overlap: 0, 1 or 2, as above.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.

    The rest leaves the papers' ways; a group is a top-level name of the params, such as "embed".

      removed: share of what was sent that leaves delta.
      update: "sign"; or "rms", x / rms(x) of each parameter; or "orthogonal", for the matrices of
        layers, and the sign for the rest (`direction`).
      step_scale: factor of the steps of a group, 1 where it is not named.
      topk_of: compression_topk of a group.
      untransformed: groups whose elements are sent themselves, and not coefficients of their DCT.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
      Psyche, https://github.com/PsycheFoundation/psyche, shared/modeling/src/distro.rs
    """

    # a direction waits a round with overlap, and there are as many signs as params
    waiting_dtype = jnp.int8 if update == "sign" else jnp.float32

    def cut(path: tuple, leaf: jax.Array) -> dct.Layout:
        return dct.layout(leaf.shape, compression_chunk, stacked=group_of(path) in stacked)

    def topk(path: tuple) -> int:
        return topk_of.get(group_of(path), compression_topk)

    def encode(path: tuple, x: jax.Array) -> jax.Array:
        return x if group_of(path) in untransformed else dct.encode(x, cut(path, x))

    def direction_of(path: tuple, coefficients: jax.Array) -> jax.Array:
        x = coefficients
        if group_of(path) not in untransformed:
            x = dct.decode(coefficients, cut(path, coefficients))
        of_layers = group_of(path) in stacked and x.ndim > 2
        return direction.BY_NAME[update if of_layers or update != "orthogonal" else "sign"](x)

    def rate_of(path: tuple, step: jax.Array) -> jax.Array | float:
        return rate(learning_rate, step) * step_scale.get(group_of(path), 1.0)

    def init(params: Tree) -> tuple[Tree, Tree]:
        def first_places(path: tuple, leaf: jax.Array) -> jax.Array:
            blocks = cut(path, leaf)
            kept = min(topk(path), blocks.area)
            places_K = jnp.arange(kept, dtype=dct.index_dtype(blocks.area))
            return jnp.broadcast_to(places_K, (blocks.blocks, kept))

        delta = jax.tree.map(lambda theta: jnp.zeros(theta.shape, jnp.float32), params)
        if not overlap:
            return {"delta": delta}, {}
        # delta is zero, so whatever places the first round removes, nothing is lost
        sent = jax.tree.map_with_path(first_places, params)
        still = jax.tree.map(lambda theta: jnp.zeros(theta.shape, waiting_dtype), params)
        return {"delta": delta, "sent": sent}, {"direction": still}

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        del shared

        def ahead(path: tuple, theta: jax.Array, delta: jax.Array) -> jax.Array:
            return theta - rate_of(path, step - 1) * direction_of(path, delta)

        return jax.tree.map_with_path(ahead, params, own["delta"])

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        del params
        lr = rate(learning_rate, step)

        def add(path: tuple, g: jax.Array, delta: jax.Array) -> jax.Array:
            return compression_decay * delta + weight * encode(path, g)

        delta = remove(own["delta"], own["sent"]) if overlap else own["delta"]
        weight = lr * clip_scale(grads, clip_grad_norm)  # one number: no pass over the gradients
        return own | {"delta": jax.tree.map_with_path(add, grads, delta)}

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del params, shared, step

        def select(path: tuple, delta: jax.Array) -> Coefficients:
            blocks = cut(path, delta)
            index_NK, value_NK = dct.top_k(delta, blocks, topk(path))
            index_NK = index_NK.astype(dct.index_dtype(blocks.area))
            if quantize_1bit:  # Psyche's sign bit: -0.0 is negative, 0.0 is not
                return Coefficients(index_NK, jnp.signbit(value_NK))
            return Coefficients(index_NK, value_NK.astype(value_dtype))

        message = jax.tree.map_with_path(select, own["delta"])
        return message, after_sending(own, message)

    def after_sending(own: Tree, message: Tree) -> Tree:
        """The peer's state once it has sent `message`."""
        sent = jax.tree.map(lambda m: m.index_NK, message, is_leaf=_is_message)
        if overlap:
            return own | {"sent": sent}
        return own | {"delta": remove(own["delta"], sent)}

    def remove(delta: Tree, sent: Tree) -> Tree:
        return jax.tree.map_with_path(
            lambda path, d, index_NK: dct.remove(d, cut(path, d), index_NK, removed), delta, sent
        )

    def receive(
        messages: Tree, present: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        decay = rate(learning_rate, step) * weight_decay

        def decode(path: tuple, theta: jax.Array, message: Coefficients) -> jax.Array:
            index_PNK, value_PNK = message
            if quantize_1bit:
                value_PNK = jnp.where(value_PNK, -1.0, 1.0)
            mean = dct.mean_of_senders(index_PNK, value_PNK, present, cut(path, theta))
            return direction_of(path, mean)

        def move(path: tuple, theta: jax.Array, d: jax.Array) -> jax.Array:
            return -(rate_of(path, when) * d + decay * theta)

        moves, when = jax.tree.map_with_path(decode, params, messages), step
        if overlap:
            waiting = jax.tree.map(lambda d: d.astype(waiting_dtype), moves)
            moves, when = shared["direction"], step + (overlap == 2)
            shared = {"direction": waiting}
        return jax.tree.map_with_path(move, params, moves), shared

    def compare(own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        far = jax.tree.map_with_path(
            lambda path, delta, sent: _distance(delta, cut(path, delta), sent),
            own["delta"],
            message,
        )
        distance = jnp.max(jnp.stack(jax.tree.leaves(far)))
        return distance, after_sending(own, message)

    def areas(params: Tree) -> Tree:
        return jax.tree.map_with_path(lambda path, theta: cut(path, theta).area, params)

    look = lookahead if overlap else no_lookahead
    return Optimizer(init, look, accumulate, send, receive, compare, areas)


def _is_message(node: object) -> bool:
    return isinstance(node, Coefficients)


def _distance(delta: jax.Array, cut: dct.Layout, message: Coefficients) -> jax.Array:
    """How far a sent message is from what this delta would send.

    The largest of: how far below the block's k-th magnitude a sent place lies, or a value of the
    other sign is off, as a share of that magnitude; and how far off a value is, as a share of
    itself: bfloat16 rounds it by up to 1/512, whatever the k-th is.
    """
    index_NK, value_NK = message
    best_NK = jnp.abs(dct.top_k(delta, cut, index_NK.shape[1])[1])
    kth_N1 = jnp.min(best_NK, axis=-1, keepdims=True)
    mine_NK = dct.take(delta, cut, index_NK)
    below_NK = kth_N1 - jnp.abs(mine_NK)
    # a block that is all but zero holds rounding only: its places say nothing
    floor = 1e-6 * jnp.max(jnp.abs(delta)) + jnp.finfo(jnp.float32).tiny
    size_N1 = jnp.maximum(kth_N1, floor)
    if value_NK.dtype == bool:
        flipped_NK = jnp.where(value_NK == jnp.signbit(mine_NK), 0.0, jnp.abs(mine_NK))
        off_NK = flipped_NK / size_N1
    else:
        off_NK = jnp.abs(value_NK - mine_NK) / jnp.maximum(size_N1, jnp.abs(mine_NK))
    return jnp.max(jnp.maximum(below_NK / size_N1, off_NK))
