"""What an optimizer is: seven pure functions, and how they compose into an optax transform."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any  # a pytree of arrays; params are nested dicts
Schedule = Callable[[jax.Array], jax.Array]  # step, the first is 1 -> learning rate
Rate = Schedule | float | jax.Array  # a learning rate, by step or always the same


class Optimizer(NamedTuple):
    """Seven pure functions. `own` is what each peer owns; `shared` is one copy, the same for all.

    init(params)                                    -> own, shared
    lookahead(params, own, shared, step)            -> params, where a peer takes its gradient
    accumulate(grads, own, params, step)            -> own, once for each local batch
    send(own, params, shared, step)                 -> message, own, once a round
    receive(messages, present, params, shared, step) -> updates, shared, once a round

    One serves an audit on other hardware, where bits cannot be equal:

    compare(own, message) -> distance, own: how far a sent message lies from what a peer with this
    `own` (after `accumulate`) would send, as a share of its scale; and `own` after sending it.

    And one serves the wire: areas(params) -> how many places each param's blocks have, which a
    message alone does not tell; None where messages are dense.

    `messages` holds every peer's message along a leading axis [peer]; `present` is a boolean for
    each of them, so that shapes do not change when one is missing. `step` counts from 1. No
    function knows whether peers are rows of an array or machines.
    """

    init: Callable[[Tree], tuple[Tree, Tree]]
    lookahead: Callable[[Tree, Tree, Tree, jax.Array], Tree]
    accumulate: Callable[[Tree, Tree, Tree, jax.Array], Tree]
    send: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
    receive: Callable[[Tree, jax.Array, Tree, Tree, jax.Array], tuple[Tree, Tree]]
    compare: Callable[[Tree, Tree], tuple[jax.Array, Tree]]
    areas: Callable[[Tree], Tree] | None


Exchange = Callable[[Tree, jax.Array], tuple[Tree, Tree]]  # message, step -> sent, received [peer]


class OptimizerState(NamedTuple):
    """State of `as_transform`: the step about to be taken, and the two parts of the optimizer's."""

    step: jax.Array
    own: Tree
    shared: Tree


def as_transform(optimizer: Optimizer, exchange: Exchange) -> optax.GradientTransformation:
    """The optimizer's functions around an exchange, as a transform for any jitted step.

    sent, received = exchange(message, step): what this peer sent, and every peer's message with a
    leading axis [peer], as `jax.lax.all_gather` gives over a mesh axis. Gradients are to be taken
    at `optimizer.lookahead(params, state.own, state.shared, state.step)`, which is the params
    themselves but for DisTrO with overlap.
    """

    def init(params: Tree) -> OptimizerState:
        own, shared = optimizer.init(params)
        return OptimizerState(jnp.ones((), jnp.int32), own, shared)

    def update(
        updates: Tree, state: OptimizerState, params: Tree | None = None
    ) -> tuple[Tree, OptimizerState]:
        if params is None:
            raise ValueError("update(updates, state, params): params are needed, for their decay")
        step, own, shared = state
        own = optimizer.accumulate(updates, own, params, step)
        message, own = optimizer.send(own, params, shared, step)
        _, received = exchange(message, step)
        present = jnp.ones(jax.tree.leaves(received)[0].shape[0], bool)
        updates, shared = optimizer.receive(received, present, params, shared, step)
        return updates, OptimizerState(step + 1, own, shared)

    return optax.GradientTransformation(init, update)


def rate(learning_rate: Rate, step: jax.Array) -> jax.Array | float:
    """The learning rate of a step."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def group_of(path: tuple) -> str | None:
    """The top-level name of a parameter."""
    return getattr(path[0], "key", None) if path else None


def no_lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
    """The default `lookahead`: the gradient is taken at the params themselves."""
    del own, shared, step
    return params


def clip_scale(grads: Tree, max_norm: float | None) -> jax.Array | float:
    """What scales gradients to a global L2 norm of at most `max_norm`, as PyTorch and Psyche do.

    min(1, max_norm / (||g|| + 1e-6)); 1 for `None` or 0.
    """
    if not max_norm:
        return 1.0
    return jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
