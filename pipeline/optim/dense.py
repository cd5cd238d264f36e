"""Plain data parallelism: peers exchange whole gradients, and step by their mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pipeline.optim.optimizer import Optimizer, Rate, Tree, clip_scale, no_lookahead, rate


def dense(
    learning_rate: Rate,
    init_state: Callable[[Tree], Tree],
    direct: Callable[[Tree, Tree], tuple[Tree, Tree]],
    *,
    weight_decay: float,
    clip_grad_norm: float | None,
) -> Optimizer:
    """An optimizer whose peers send whole gradients, and share all of its state.

        g       = clip(mean over present peers of g_p)
        d, s    = direct(g, s)
        theta  <- theta - lr * (d + weight_decay * theta)

    A message is the gradient in float32: 4 bytes per parameter, from each peer, each round. Peers
    count equally, also where the batch does not divide evenly among them, as in Psyche.

    Args:
      learning_rate: of a step, the first is 1; or a number.
      init_state: params -> s, nested dicts of arrays.
      direct: the direction d of a step, and s after it; where rules differ, this is what differs.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of the mean gradient; None or 0 for no clipping.
    """

    def init(params: Tree) -> tuple[Tree, Tree]:
        return {}, init_state(params)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        del own, params, step
        return grads

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del params, shared, step
        return own, {}

    def receive(
        messages: Tree, present: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        count = jnp.maximum(jnp.sum(present), 1)

        def mean(g: jax.Array) -> jax.Array:
            mask = present.reshape(-1, *[1] * (g.ndim - 1))
            return jnp.sum(jnp.where(mask, g, 0.0), axis=0) / count

        grads = jax.tree.map(mean, messages)
        scale = clip_scale(grads, clip_grad_norm)
        grads = jax.tree.map(lambda g: g * scale, grads)
        direction, shared = direct(grads, shared)
        lr = rate(learning_rate, step)
        updates = jax.tree.map(lambda d, theta: -lr * (d + weight_decay * theta), direction, params)
        return updates, shared

    def compare(own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        off = optax.tree.norm(jax.tree.map(jnp.subtract, message, own))
        return off / (optax.tree.norm(own) + jnp.finfo(jnp.float32).tiny), {}

    return Optimizer(init, no_lookahead, accumulate, send, receive, compare, areas=None)
