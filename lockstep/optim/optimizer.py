"""The interface of optimizers: seven pure functions over two states."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect

Tree: TypeAlias = Any  # a pytree of arrays; params are nested dicts
KeyPath: TypeAlias = tuple[Any, ...]  # where a leaf lies in its tree, as jax.tree_util has it


class RoundPeers(NamedTuple):
    """What `receive` knows of each peer besides its message: int32 [peer], never the peer's word.

    Attributes:
      weight: Sequences that the peer was assigned; 0 where it is absent.
      age: Versions of the params that came after those that its message began with.
      steps: Local steps that it took; 0 where it is absent.
    """

    weight: jax.Array
    age: jax.Array
    steps: jax.Array

    @classmethod
    def synchronous(cls, weight: jax.Array, steps: int = 1) -> "RoundPeers":
        """Return peers, for `receive` of an optimizer, that all began with the newest params.

        In a round of `steps` local steps, a peer with fewer sequences takes one step for each.
        """
        return cls(weight, 0 * weight, weight.clip(0, steps))


class Merge(NamedTuple):
    """`Optimizer.receive` in two parts, for messages too large to have all peers' on a device.

        receive(messages, peers, params, shared, step)
          = take(aggregate(messages, peers.weight), params, shared, step)

    Attributes:
      aggregate: The rule of aggregation. What it makes of an element depends on no other element,
        so that an array can be merged a slice at a time.
      take: take(merged, params, shared, step) -> updates, shared: `receive` after its aggregate.
    """

    aggregate: Callable[[Tree, jax.Array], Tree]
    take: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]


def no_align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
    """Return the peer's state as it is: the default `align` of an optimizer."""
    return own


def no_lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
    """Return the params themselves: the default `lookahead` of an optimizer."""
    return params


class Optimizer(NamedTuple):
    """Seven pure functions over two states: `own` of each peer, and `shared`, which is one copy.

        own, shared = init(params)
        each round, each peer:
          inner_steps times, before the one with the number `delay`:
            own        = align(own, params, the fragment of the last round)
          and in each of them:
            grads      at lookahead(params, own, shared, step)
            own        = accumulate(grads, own, params, step)
          message, own = send(own, params, shared, step)
        each round, once and the same for all:
          updates, shared = receive(messages, peers, params, shared, step)

    `params` are those that all peers agree on, nested dicts of arrays; `grads` and `updates` have
    their shapes. `step` is int32 [], the round, counted from 1. In `lookahead` and `accumulate` of
    several local steps it is float32 [], the rounds done after this local step: the last one of
    round 3 has 3.0.

    No function knows whether peers are rows of an array or machines. Shapes do not change when a
    peer is absent.

    Attributes:
      init: The states before the first round; `own` is at first the same for every peer.
      accumulate: The peer's state after one local step, whose mean gradient is `grads`.
      send: The peer's message, whose shapes and dtypes are the same in every round, and its state
        after sending it.
      receive: What all peers add to their params. `messages` have a leading axis [peer] on every
        array; the row of an absent peer, whose weight in `peers` is 0, may hold anything, and
        changes no bit.
      areas: areas(params) -> the positions in a block of each parameter, which messages do not
        hold: an int in place of each named tuple, as `Coefficients`; 0 for an array sent whole.
      lookahead: The params at which a peer takes its gradient.
      align: The peer's state after it adopts the result of a round, the fragment that is int32 [].
        Called once for each round, also by a peer that takes no step in it.
      inner_steps: Local steps of a round.
      fragments: Number of fragments of the params; rounds exchange one each, in turns.
      delay: Local steps of the next round that a peer takes before it needs what was exchanged,
        and aligns; at most inner_steps.
      merge: The parts of `receive`, where it has such.
    """

    init: Callable[[Tree], tuple[Tree, Tree]]
    accumulate: Callable[[Tree, Tree, Tree, jax.Array], Tree]
    send: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
    receive: Callable[[Tree, RoundPeers, Tree, Tree, jax.Array], tuple[Tree, Tree]]
    areas: Callable[[Tree], Tree]
    lookahead: Callable[[Tree, Tree, Tree, jax.Array], Tree] = no_lookahead
    align: Callable[[Tree, Tree, jax.Array], Tree] = no_align
    inner_steps: int = 1
    fragments: int = 1
    delay: int = 0
    merge: Merge | None = None

    @property
    def aligns(self) -> bool:
        """Whether an optimizer's state of a peer changes as it adopts the result of a round."""
        return self.align is not no_align

    @property
    def looks_ahead(self) -> bool:
        """Whether the optimizer takes gradients elsewhere than at the params."""
        return self.lookahead is not no_lookahead

    @property
    def overlapped(self) -> float:
        """Share of a round's training beside which the optimizer's last messages travel."""
        return self.delay / self.inner_steps


def inside(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer for a state of peers that has `own` as its attribute `optimizer`.

    Its `init` is left to the caller, whose states have more in them.
    """
    expect.kind(Optimizer, optimizer=optimizer)

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return optimizer.lookahead(params, own.optimizer, shared, step)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return own._replace(optimizer=optimizer.accumulate(grads, own.optimizer, params, step))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, state = optimizer.send(own.optimizer, params, shared, step)
        return message, own._replace(optimizer=state)

    def align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        return own._replace(optimizer=optimizer.align(own.optimizer, params, fragment))

    return optimizer._replace(
        lookahead=lookahead if optimizer.looks_ahead else no_lookahead,
        accumulate=accumulate,
        send=send,
        align=align if optimizer.aligns else no_align,
    )


def align(optimizer: Optimizer, own: Tree, params: Tree, step: jax.Array) -> Tree:
    """Return a peer's state of an optimizer after it adopts, in round `step`, the round before.

    The first round, 1, has nothing to adopt.
    """
    if not optimizer.aligns:
        return own

    # Round 1 exchanges fragment 0: the round before `step` exchanged fragment step - 2, in turns.
    def take_up(own: Tree) -> Tree:
        return optimizer.align(own, params, (step - 2) % optimizer.fragments)

    return jax.lax.cond(step > 1, take_up, lambda own: own, own)


def align_before(
    optimizer: Optimizer, own: Tree, params: Tree, step: jax.Array, local: jax.Array
) -> Tree:
    """Return a peer's state of an optimizer before a local step: after `align`, if due then.

    `step` is the round, counted from 1; `local` the local step in it, counted from 0.
    """
    if not optimizer.aligns:
        return own
    due = local == optimizer.delay
    return jax.lax.cond(due, lambda own: align(optimizer, own, params, step), lambda own: own, own)


def rate(learning_rate: optax.ScalarOrSchedule, step: jax.Array) -> Any:
    """Return an optimizer's learning rate, number or schedule, in a step; the first step is 1."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def group_of(path: KeyPath) -> str | None:
    """Return the group that an optimizer counts a parameter to: its top-level name."""
    return getattr(path[0], "key", None) if path else None


def scaled(step_scale: Mapping[str, float], path: KeyPath, step: Any) -> Any:
    """Return an optimizer's step at `path`, times the factor of its group: 1 if not named."""
    factor = step_scale.get(group_of(path) or "", 1.0)
    return step if factor == 1.0 else step * factor


def clip_scale(grads: Tree, max_norm: float | None) -> jax.Array | float:
    """Return the factor by which an optimizer bounds gradients' global L2 norm, as PyTorch does.

        min(1, max_norm / (||g|| + 1e-6))

    No bound, None or 0, gives 1.
    """
    # With `optax.inject_hyperparams` the bound is traced, so no Python branch can depend on it.
    traced = isinstance(max_norm, jax.core.Tracer)
    if max_norm is None or not (traced or max_norm):
        return 1.0
    scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
    return jnp.where(max_norm == 0, 1.0, scale) if traced else scale
