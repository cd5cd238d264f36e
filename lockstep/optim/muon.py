"""Muon in plain data parallelism, with step sizes by group as AdaDistro has them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import optax

from lockstep.optim import step_direction
from lockstep.optim.adamw import adam
from lockstep.optim.aggregation.aggregate import EQUAL_MEAN, AggregateFn
from lockstep.optim.dense import dense
from lockstep.optim.expect import expect_by_group, expect_decay, expect_groups, expect_rates
from lockstep.optim.optimizer import KeyPath, Optimizer, Tree, group_of


class MuonState(NamedTuple):
    """State of `muon`, by the params' paths joined with ".".

    Attributes:
      adam: Adam's moments of embeddings, head and norms.
      momentum: Momentum of the matrices of layers.
    """

    adam: optax.OptState
    momentum: dict[str, jax.Array]


def muon(  # noqa: PLR0913 - Adam's settings are among them
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
    step_scale: Mapping[str, float],
    stacked: tuple[str, ...] = (),
    aggregate: AggregateFn = EQUAL_MEAN,
) -> Optimizer:
    """Return Muon for the matrices of layers and Adam for the rest.

    With the names of `dense`:

        m      <- momentum * m + g;  d = O(g + momentum * m)        matrices of layers
        d       = Adam's direction of g                             embeddings, head, norms
        d      <- d * step_scale[group]

    with O(.) the nearest orthogonal matrix, scaled to an rms of about 1 (`step_direction`): as long
    a step as a sign's, so that step_scale means what it means in AdaDistro.

    Args:
      learning_rate: A schedule of the step, counted from 1, or a constant.
      momentum: Decay of Nesterov's momentum of the matrices of layers.
      betas: Decay of Adam's first and second moment.
      eps: Added to the root of the second moment.
      weight_decay: Decoupled weight decay, per unit of learning rate.
      clip_grad_norm: Largest global L2 norm of the mean gradient; None or 0 for no clipping.
      step_scale: Factor of a group's steps, 1 where it is not named; a group is a top-level name of
        the params, such as "layers".
      stacked: Top-level groups of the params whose leaves carry a leading layer axis.
      aggregate: Takes the place of the mean; see `dense`.

    References:
      Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    expect_decay("momentum", momentum)
    expect_by_group(expect_rates, step_scale=step_scale)
    expect_groups(stacked=stacked)
    moments = adam(betas, eps)

    def split(tree: Tree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the matrices of layers, and the rest, by path."""
        matrices: dict[str, jax.Array] = {}
        rest: dict[str, jax.Array] = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            part = matrices if group_of(path) in stacked and leaf.ndim > 2 else rest
            part[_dotted(path)] = leaf
        return matrices, rest

    def init(params: Tree) -> MuonState:
        matrices, rest = split(params)
        return MuonState(moments.init(rest), optax.tree.zeros_like(matrices))

    def update(
        grads: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, MuonState]:
        matrices, rest = split(grads)
        trace = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, matrices)
        ahead = jax.tree.map(
            lambda m, g: step_direction.orthogonal(g + momentum * m), trace, matrices
        )
        others, adam = moments.update(rest, state.adam)
        directions = ahead | others

        def scaled(path: KeyPath, leaf: jax.Array) -> jax.Array:
            d: jax.Array = directions[_dotted(path)] * step_scale.get(group_of(path) or "", 1.0)
            return d

        return jax.tree.map_with_path(scaled, grads), MuonState(adam, trace)

    direction = optax.GradientTransformation(init, update)
    return dense(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        aggregate=aggregate,
    )


def _dotted(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
