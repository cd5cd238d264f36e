"""Muon in plain data parallelism: what a dense optimizer gains from AdaDistro's ideas."""

from collections.abc import Mapping

import jax
import optax

from pipeline.optim import direction
from pipeline.optim.dense import dense
from pipeline.optim.optimizer import Optimizer, Rate, Tree, group_of


def muon(
    learning_rate: Rate,
    *,
    momentum: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
    step_scale: Mapping[str, float],
    stacked: tuple[str, ...] = (),
) -> Optimizer:
    """Muon for the matrices of layers, Adam for the rest, in the words of `dense`:

        m      <- momentum * m + g;  d = O(g + momentum * m)        matrices of layers
        d       = Adam's direction of g                             embeddings, head, norms
        d      <- d * step_scale[group]

    with O(.) the nearest orthogonal matrix, scaled to an rms of about 1 (`direction`): as long a
    step as a sign's, so that step_scale means what it means in AdaDistro.

    Args:
      learning_rate: of a step, the first is 1; or a number.
      momentum: Nesterov's, of the matrices of layers.
      betas: decay of Adam's first and second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of the mean gradient; None or 0 for no clipping.
      step_scale: factor of a group's steps, 1 where it is not named; a group is a top-level name of
        the params, such as "layers".
      stacked: top-level groups of the params whose leaves carry a leading layer axis.

    References:
      Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    moments = optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)

    def is_matrix_of_layers(path: tuple, leaf: jax.Array) -> bool:
        return group_of(path) in stacked and leaf.ndim > 2

    def parted(tree: Tree) -> tuple[dict, dict]:
        """The matrices of layers, and the rest, by path."""
        matrices, rest = {}, {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            part = matrices if is_matrix_of_layers(path, leaf) else rest
            part[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
        return matrices, rest

    def init(params: Tree) -> Tree:
        matrices, rest = parted(params)
        adam = moments.init(rest)._asdict()
        return {"momentum": optax.tree.zeros_like(matrices), "adam": adam}

    def direct(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        matrices, rest = parted(grads)
        trace = jax.tree.map(lambda m, g: momentum * m + g, state["momentum"], matrices)
        ahead = jax.tree.map(lambda m, g: direction.orthogonal(g + momentum * m), trace, matrices)
        others, adam = moments.update(rest, optax.ScaleByAdamState(**state["adam"]))
        found = ahead | others

        def scaled(path: tuple, leaf: jax.Array) -> jax.Array:
            d = found[jax.tree_util.keystr(path, simple=True, separator=".")]
            return d * step_scale.get(group_of(path), 1.0)

        state = {"momentum": trace, "adam": adam._asdict()}
        return jax.tree.map_with_path(scaled, grads), state

    return dense(
        learning_rate, init, direct, weight_decay=weight_decay, clip_grad_norm=clip_grad_norm
    )
