"""An optimizer as an optax transform: its functions around an exchange of messages."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from lockstep.optim import expect
from lockstep.optim.optimizer import KeyPath, Optimizer, RoundPeers, Tree, align_before

Exchange: TypeAlias = Callable[[Tree, jax.Array], tuple[Tree, Tree]]
"""`exchange(message, step)` returns what this peer sent, and every peer's message with a leading
axis [peer]."""


def all_gather(axis_name: str = "peer", *, to: str = "varying") -> Exchange:
    """Return the exchange of peers that are rows of a mesh or vmap axis.

    `to` is the type of the result, as in `jax.lax.all_gather`. With "invarying", the checks that
    `shard_map` makes by default know that updates are the same for all: params can leave it as one
    copy.
    """

    def exchange(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        return message, jax.lax.all_gather(message, axis_name, to=to)

    return exchange


def alone(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
    """Exchange nothing, for a transform: a lone peer receives what it sends."""
    return message, jax.tree.map(lambda x: x[None], message)


class OptimizerState(NamedTuple):
    """State of an optax transform by `as_transform`.

    `optax.tree.get(state, "steps_taken")` finds the steps in any chain or wrapper of optax, and
    `optax.tree.get(state, "count")` what it finds in optax's own: Adam's count, with Adam inside.

    Attributes:
      steps_taken: int32 [], the local steps taken.
      own: The peer's state.
      shared: The state that is one copy.
    """

    steps_taken: jax.Array
    own: Tree
    shared: Tree


def as_transform(
    optimizer: Optimizer, exchange: Exchange, *, lookahead: bool = False
) -> optax.GradientTransformation:
    """Compose an optimizer and an exchange into a transform for any jitted step.

    Gradients are to be taken at `lookahead_params(optimizer, params, state)`: the params themselves
    except with local steps, and for DisTrO with overlap. For those, `lookahead=True` states that
    the caller does so, since gradients do not tell where they were taken:

        tx = as_transform(optimizer, exchange, lookahead=True)

        def step(params, state, batch):
            grads = jax.grad(loss)(lookahead_params(optimizer, params, state), batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    With several local steps in a round, the last one alone exchanges, and updates of the others are
    zero; under `shard_map` that takes `check_vma=False`.

    Peers have equal weights. One whose gradient has an infinity or a NaN counts as absent in that
    step, and its own state stays as it was. `optax.apply_if_finite` around this would decide for
    each peer alone: their params would come apart.

    With `optax.inject_hyperparams`, wrap what is to be changed:

        def tx(learning_rate, weight_decay):
            return as_transform(distro(CompressedMomentum(learning_rate, ...)), exchange)

        tx = optax.inject_hyperparams(tx)(learning_rate=0.01, weight_decay=0.1)

    The exchange is `all_gather("peer")`, `alone` or the like; beside the optimizer's message it
    gets that peer's weight.

    Raises:
      ValueError: The optimizer looks ahead, and `lookahead` is False.
    """
    expect.kind(Optimizer, optimizer=optimizer)
    expect.function("exchange", exchange, "exchange(message, step) -> sent, received")
    expect.flags(lookahead=lookahead)
    expected = "True, and gradients at lookahead_params(optimizer, params, state)"
    expect.setting("lookahead", lookahead, lambda x: x or not optimizer.looks_ahead, expected)

    def init(params: Tree) -> OptimizerState:
        own, shared = optimizer.init(_nested(nnx.as_pure(params)))
        return OptimizerState(jnp.zeros((), jnp.int32), own, shared)

    def update(
        updates: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, OptimizerState]:
        if params is None:
            raise ValueError("update(updates, state, params): params are needed, for their decay")
        count, own, shared = state
        grads, params = _nested(updates), _nested(params)
        own = _align_at(optimizer, own, params, count)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        accumulated = optimizer.accumulate(grads, own, params, next_step(optimizer, count))

        def end_round() -> tuple[Tree, Tree, Tree]:
            step = count // optimizer.inner_steps + 1
            message, after = optimizer.send(accumulated, params, shared, step)
            # A gradient that is not finite must not stay in the momentum, or it would spoil every
            # later message of this peer.
            after = jax.tree.map(partial(jnp.where, finite), after, own)
            _, (received, weight) = exchange((message, finite.astype(jnp.int32)), step)
            peers = RoundPeers(weight, 0 * weight, optimizer.inner_steps * weight)
            steps, agreed = optimizer.receive(received, peers, params, shared, step)
            return steps, after, agreed

        def continue_round() -> tuple[Tree, Tree, Tree]:
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(end_round)[0])
            return zeros, jax.tree.map(partial(jnp.where, finite), accumulated, own), shared

        if optimizer.inner_steps == 1:
            steps, own, shared = end_round()
        else:
            last = (count + 1) % optimizer.inner_steps == 0
            steps, own, shared = jax.lax.cond(last, end_round, continue_round)
        steps = flatten_dict(steps)
        updates = jax.tree.map_with_path(lambda path, _: steps[_names(path)], updates)
        return updates, OptimizerState(count + 1, own, shared)

    return optax.GradientTransformation(init, update)


def lookahead_params(optimizer: Optimizer, params: Tree, state: optax.OptState) -> Tree:
    """Return the params at which a peer of a transform takes its next gradient.

    `params` are those that all peers agree on, in any tree; `state` is that of `as_transform`, or
    of a chain or wrapper with one such transform in it.

    Raises:
      ValueError: No state of `as_transform` is in `state`.
    """
    params, state = nnx.as_pure(params), nnx.as_pure(state)
    if not isinstance(state, OptimizerState):
        state = optax.tree.get(state, OptimizerState.__name__, default=state)
    expect.kind(OptimizerState, state=state)
    count, own, shared = state
    nested = _nested(params)
    own = _align_at(optimizer, own, nested, count)
    ahead = flatten_dict(optimizer.lookahead(nested, own, shared, next_step(optimizer, count)))
    return jax.tree.map_with_path(lambda path, _: ahead[_names(path)], params)


def _align_at(optimizer: Optimizer, own: Tree, params: Tree, count: jax.Array) -> Tree:
    """Return a transform's state of a peer before its next local step, after `count` of them."""
    step, local = count // optimizer.inner_steps + 1, count % optimizer.inner_steps
    return align_before(optimizer, own, params, step, local)


def next_step(optimizer: Optimizer, count: jax.Array) -> jax.Array:
    """Return the `step` that a transform's local step sees after `count` local steps."""
    return count + 1 if optimizer.inner_steps == 1 else (count + 1) / optimizer.inner_steps


def _nested(tree: Tree) -> Tree:
    """Return the leaves of a tree that a transform takes, as a module's state, in nested dicts."""
    return unflatten_dict({_names(path): x for path, x in jax.tree.leaves_with_path(tree)})


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("",)
