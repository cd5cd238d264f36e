"""AdamW in plain data parallelism: peers exchange whole gradients. The baseline of all else."""

import jax
import jax.numpy as jnp
import optax

from pipeline.optim.optimizer import Optimizer, Rate, Tree, clip_scale, look_here, rate


def adamw(
    learning_rate: Rate,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """AdamW on the mean of all present peers' gradients.

        g       = clip(mean over present peers of g_p)
        m, v    = Adam's moments of g, bias-corrected
        theta  <- theta - lr * (m / (sqrt(v) + eps) + weight_decay * theta)

    A message is the whole gradient in float32: 4 bytes per parameter, from each peer, each round.
    Peers count equally, also where the batch does not divide evenly among them, as in Psyche.

    Args:
      learning_rate: of a step, the first is 1; or a number.
      betas: decay of the first and second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of the mean gradient; None or 0 for no clipping.

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101
    """
    moments = optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)

    def init(params: Tree) -> tuple[Tree, Tree]:
        return {}, moments.init(params)._asdict()

    def inner(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
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
        direction, state = moments.update(grads, optax.ScaleByAdamState(**shared), params)
        lr = rate(learning_rate, step)
        updates = jax.tree.map(lambda d, theta: -lr * (d + weight_decay * theta), direction, params)
        return updates, state._asdict()

    def compare(own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        off = optax.tree.norm(jax.tree.map(jnp.subtract, message, own))
        return off / (optax.tree.norm(own) + jnp.finfo(jnp.float32).tiny), {}

    return Optimizer(init, look_here, inner, send, receive, compare, areas=None)
