"""Plain data parallelism: peers exchange whole gradients, and step by their mean.

Peers count by what their gradients are means of (`RoundPeers.weight`), so that the mean of their
means is the mean over the whole batch, however it was divided.

Arguments that these optimizers share:

    learning_rate   a schedule of the step, counted from 1, or a constant
    weight_decay    decoupled weight decay, per unit of a parameter's own step size
    clip_grad_norm  largest global L2 norm of the mean gradient; None or 0 for no clipping
    step_scale      factor of the steps of a group of params, 1 where it is not named; a group is a
                    top-level name of the params, such as "layers"
    aggregate       takes the place of the mean, see `aggregation.py`
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, mean
from lockstep.optim.directions import orthogonal
from lockstep.optim.optimizer import (
    KeyPath,
    Merge,
    Optimizer,
    RoundPeers,
    Tree,
    clip_scale,
    group_of,
    rate,
    scaled,
)

TRIED_STEPS = 10  # steps: a warm-up may begin with none
LARGEST_GRADIENT = 2.0**60  # of an element: an infinite second moment would stay so for ever


def dense(
    learning_rate: optax.ScalarOrSchedule,
    direction: optax.GradientTransformation,
    *,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    step_scale: Mapping[str, float] = {},
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return an optimizer whose peers send whole gradients, and share all of its state.

        g       = clip(mean over present peers of g_p)
        d, s    = direction(g, s)
        theta  <- theta - lr * step_scale[group] * (d + weight_decay * theta)

    `direction` is any of optax's `scale_by_*`, or the like: the direction d of a step, up the
    gradient, and the state s. `from_optax` takes whole optimizers, which go down.

    A message is the gradient in float32: 4 bytes per parameter, from each peer, each round.
    """
    expect.learning_rate(learning_rate)
    expect.kind(optax.GradientTransformation, direction=direction)
    expect.rates(weight_decay=weight_decay)
    expect.clip(clip_grad_norm)
    expect.by_group(expect.rates, step_scale=step_scale)
    expect.aggregate(aggregate)
    if _slope(direction) < 0:
        raise ValueError(
            "direction goes down the gradient, as a whole optimizer does, expected one that goes "
            "up, such as optax.scale_by_adam(); or write from_optax(optimizer)"
        )

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
        d, shared = direction.update(grads, shared, params)
        lr = rate(learning_rate, step)

        def update(path: KeyPath, d: jax.Array, theta: jax.Array) -> Any:
            return -lr * scaled(step_scale, path, d + weight_decay * theta)

        return jax.tree.map_with_path(update, d, params), shared

    def areas(params: Tree) -> Tree:
        return jax.tree.map(lambda _: 0, params)

    merge = Merge(aggregate, take) if aggregate is mean else None
    return Optimizer(init, accumulate, send, receive, areas, merge=merge)


def from_optax(
    optimizer: optax.GradientTransformation, *, aggregate: AggregateFn = mean
) -> Optimizer:
    """Return any optimizer of optax, as `optax.adam(1e-3)`, on the mean of all peers' gradients."""
    expect.kind(optax.GradientTransformation, optimizer=optimizer)
    if _slope(optimizer) > 0:
        raise ValueError(
            "optimizer goes up the gradient, expected one that goes down, with a learning rate: "
            "optax.adam(1e-3), or dense(1e-3, optax.scale_by_adam())"
        )

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.negative, updates), state

    direction = optax.GradientTransformation(optimizer.init, update)
    return dense(1.0, direction, aggregate=aggregate)


def _slope(transform: optax.GradientTransformation) -> float:
    """Return whole gradients times updates at the first step that moves; 0 if none can be tried."""
    params = {"w": jnp.full((2, 4), 1e-3)}
    grads = {"w": jnp.array([[1.0, -2.0, 3.0, -4.0], [-4.0, 3.0, 2.0, 1.0]])}
    try:
        state = transform.init(params)
        for _ in range(TRIED_STEPS):
            updates, state = transform.update(grads, state, params)
            slope = jnp.vdot(grads["w"], updates["w"])
            if isinstance(slope, jax.core.Tracer) or slope:
                break
    except Exception:  # it is for other params, or takes more than gradients
        return 0.0
    return 0.0 if isinstance(slope, jax.core.Tracer) else float(slope)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
    step_scale: Mapping[str, float] = {},
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return dense AdamW, on the mean of all present peers' gradients: the baseline of all else.

    With the names of `dense`:

        m, v    = Adam's moments of g, which decay by betas, bias-corrected
        d       = m / (sqrt(v) + eps)

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101
    """
    return dense(
        learning_rate,
        adam(betas, eps),
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        step_scale=step_scale,
        aggregate=aggregate,
    )


def adam(betas: tuple[float, float], eps: float) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam`, settings checked, of whole gradients with finite squares."""
    pair = "two numbers"
    expect.setting("betas", betas, lambda x: isinstance(x, tuple | list) and len(x) == 2, pair)
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        expect.decay(name, beta)
    expect.rates(eps=eps)
    moments = optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)

    def update(
        grads: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, optax.OptState]:
        bounded = jax.tree.map(lambda g: jnp.clip(g, -LARGEST_GRADIENT, LARGEST_GRADIENT), grads)
        result: tuple[Tree, optax.OptState] = moments.update(bounded, state, params)
        return result

    return optax.GradientTransformation(moments.init, update)


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    step_scale: Mapping[str, float] = {},
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return dense SGD, on the mean of all present peers' gradients.

    With the names of `dense`, and as PyTorch and optax have it:

        m  <- momentum * m + g
        d   = m, or with Nesterov's g + momentum * m

    A momentum of 0 keeps no m.

    References:
      Sutskever et al., On the importance of initialization and momentum in deep learning,
        https://proceedings.mlr.press/v28/sutskever13.html
    """
    expect.decay("momentum", momentum)
    expect.flags(nesterov=nesterov)
    has_momentum = isinstance(momentum, jax.core.Tracer) or bool(momentum)
    expect.setting("nesterov", nesterov, lambda x: has_momentum or not x, "false without momentum")
    return dense(
        learning_rate,
        optax.trace(momentum, nesterov) if has_momentum else optax.identity(),
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        step_scale=step_scale,
        aggregate=aggregate,
    )


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
    step_scale: Mapping[str, float] = {},
    stacked: tuple[str, ...] = (),
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return Muon for the matrices of layers and Adam, of `betas` and `eps`, for the rest.

    With the names of `dense`:

        m      <- momentum * m + g;  d = O(g + momentum * m)        matrices of layers
        d       = Adam's direction of g                             embeddings, head, norms

    with O(.) the nearest orthogonal matrix, scaled to an rms of about 1 (`orthogonal`): as long a
    step as a sign's, so that step_scale means what it means in DisTrO.

    Leaves of the groups in `stacked` carry a leading layer axis.

    References:
      Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    expect.decay("momentum", momentum)
    expect.groups(stacked=stacked)
    moments = adam(betas, eps)

    def split(tree: Tree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the matrices of layers, which Muon moves, and the rest, by path."""
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
        orthogonals = jax.tree.map(lambda m, g: orthogonal(g + momentum * m), trace, matrices)
        others, adam = moments.update(rest, state.adam)
        directions = orthogonals | others
        nested = jax.tree.map_with_path(lambda path, _: directions[_dotted(path)], grads)
        return nested, MuonState(adam, trace)

    return dense(
        learning_rate,
        optax.GradientTransformation(init, update),
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        step_scale=step_scale,
        aggregate=aggregate,
    )


def _dotted(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
