"""Gradients divided by the root of their factored second moment, before an optimizer sees them."""

import jax
import jax.numpy as jnp

from pipeline.optim.optimizer import Optimizer, Tree, clip_scale, group_of

EPS = 1e-8  # as Adam's: a gradient smaller than this stays small
TINY = 1e-30  # keeps the first gradient that is all zeros from 0 / 0


def normalized(
    optimizer: Optimizer,
    decay: float,
    clip_grad_norm: float | None = None,
    stacked: tuple[str, ...] = (),
) -> Optimizer:
    """The optimizer on gradients whose elements are all about as large as 1.

    Each peer keeps, of its own gradients g, decayed means over the columns and over the rows of the
    squares of each matrix, from which Adafactor estimates each element's second moment:

        R   <- decay * R + (1 - decay) * mean over columns of g^2
        C   <- decay * C + (1 - decay) * mean over rows of g^2
        v    = R C^T / mean(R)
        g   <- g / (sqrt(v / w) + 1e-8)

    with w, what the decayed weights add up to, as Adam's bias correction. A vector's v is its own
    decayed square. So a peer needs memory for a row and a column of each matrix, not for another
    copy of the params.

    Args:
      optimizer: what takes the normalized gradients; its own state lies under "optimizer".
      decay: of the second moment, per round, in [0, 1).
      clip_grad_norm: largest global L2 norm of a gradient before that; None or 0 for no clipping.
      stacked: top-level groups of the params whose leaves carry a leading layer axis.

    References:
      Shazeer, Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
      https://arxiv.org/abs/1804.04235
    """

    def is_matrix(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim - (group_of(path) in stacked) >= 2

    def means(path: tuple, g: jax.Array) -> dict[str, jax.Array]:
        square = jnp.square(g)
        if not is_matrix(path, g):
            return {"element": square}
        return {
            "row": jnp.mean(square, axis=-1, keepdims=True),
            "column": jnp.mean(square, axis=-2, keepdims=True),
        }

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        zero = jax.tree.map_with_path(lambda path, p: means(path, jnp.zeros_like(p)), params)
        return {"optimizer": own, "second": zero, "weight": jnp.zeros(())}, shared

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return optimizer.lookahead(params, own["optimizer"], shared, step)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        if clip_grad_norm:
            scale = clip_scale(grads, clip_grad_norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        weight = decay * own["weight"] + (1 - decay)
        second = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new,
            own["second"],
            jax.tree.map_with_path(means, grads),
        )

        def divide(g: jax.Array, of: dict[str, jax.Array]) -> jax.Array:
            if "element" in of:
                return g / (jnp.sqrt(of["element"] / weight) + EPS)
            # roots before their product: the square of a small gradient's square would be zero
            row = of["row"] / (jnp.mean(of["row"], axis=-2, keepdims=True) + TINY)
            return g / (jnp.sqrt(row) * jnp.sqrt(of["column"] / weight) + EPS)

        grads = jax.tree.map(divide, grads, second)
        inside = optimizer.accumulate(grads, own["optimizer"], params, step)
        return {"optimizer": inside, "second": second, "weight": weight}

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, inside = optimizer.send(own["optimizer"], params, shared, step)
        return message, own | {"optimizer": inside}

    def compare(own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        distance, inside = optimizer.compare(own["optimizer"], message)
        return distance, own | {"optimizer": inside}

    return optimizer._replace(
        init=init, lookahead=lookahead, accumulate=accumulate, send=send, compare=compare
    )
