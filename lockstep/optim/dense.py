"""Plain data parallelism: peers exchange whole gradients, and step by their mean."""

import jax
import jax.numpy as jnp
import optax

from lockstep.optim.aggregation.aggregate import EQUAL_MEAN, ON_HOST, AggregateFn
from lockstep.optim.expect import (
    expect_aggregate,
    expect_clip,
    expect_kind,
    expect_learning_rate,
    expect_rates,
)
from lockstep.optim.optimizer import (
    Merge,
    Optimizer,
    RoundPeers,
    Tree,
    clip_scale,
    no_lookahead,
    norm_ratio,
    rate,
)


def dense(
    learning_rate: optax.ScalarOrSchedule,
    direction: optax.GradientTransformation,
    *,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    aggregate: AggregateFn = EQUAL_MEAN,
) -> Optimizer:
    """Return an optimizer whose peers send whole gradients, and share all of its state.

        g       = clip(mean over present peers of g_p)
        d, s    = direction(g, s)
        theta  <- theta - lr * (d + weight_decay * theta)

    A message is the gradient in float32: 4 bytes per parameter, from each peer, each round. Peers
    count equally, even if the batch does not divide evenly among them, as in Psyche.

    Args:
      learning_rate: A schedule of the step, counted from 1, or a constant.
      direction: Any of optax's `scale_by_*`, or the like: the direction d of a step, and the state
        s, from gradients alone.
      weight_decay: Decoupled weight decay, per unit of learning rate.
      clip_grad_norm: Largest global L2 norm of the mean gradient; None or 0 for no clipping.
      aggregate: Takes the place of the mean; `aggregate.mean` has peers count by their weights.
    """
    expect_learning_rate("learning_rate", learning_rate)
    expect_kind(optax.GradientTransformation, direction=direction)
    expect_rates(weight_decay=weight_decay)
    expect_clip(clip_grad_norm)
    expect_aggregate(aggregate)

    def init(params: Tree) -> tuple[Tree, Tree]:
        return optax.EmptyState(), direction.init(params)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return grads

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        return own, optax.EmptyState()

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        return take(aggregate(messages, peers.weight), params, shared, step)

    def take(merged: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        scale = clip_scale(merged, clip_grad_norm)
        grads = jax.tree.map(lambda g: g * scale, merged)
        d, shared = direction.update(grads, shared)
        lr = rate(learning_rate, step)
        updates = jax.tree.map(lambda d, theta: -lr * (d + weight_decay * theta), d, params)
        return updates, shared

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        off = jax.tree.map(jnp.subtract, message, own)
        return norm_ratio(off, own), optax.EmptyState()

    def areas(params: Tree) -> Tree:
        return jax.tree.map(lambda _: 0, params)

    merge = Merge(ON_HOST[aggregate], take) if aggregate in ON_HOST else None
    return Optimizer(init, no_lookahead, accumulate, send, receive, compare, areas, merge=merge)
