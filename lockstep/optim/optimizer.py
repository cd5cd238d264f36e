"""The interface of optimizers: eight pure functions over two states."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim.expect import expect_kind

Tree: TypeAlias = Any  # a pytree of arrays; params are nested dicts
KeyPath: TypeAlias = tuple[Any, ...]  # where a leaf lies in its tree, as jax.tree_util has it
SMALLEST_NORMAL = np.finfo(np.float32).tiny


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
        """Return peers that all began with the newest params.

        Args:
          weight: int32 [peer], sequences assigned; 0 where a peer is absent.
          steps: Local steps of a round; a peer with fewer sequences takes one step for each.
        """
        return cls(weight, 0 * weight, weight.clip(0, steps))


class InitFn(Protocol):
    """init(params) -> own, shared."""

    def __call__(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the state before the first step.

        Args:
          params: Nested dicts of arrays.

        Returns:
          own: State that each peer owns, at first the same for every peer.
          shared: State that is one copy for all peers.
        """


class AlignFn(Protocol):
    """align(own, params, fragment) -> own."""

    def __call__(self, own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        """Return the peer's state after it adopts what peers last agreed on in a fragment.

        Called once for the result of each round, by every peer that is present, whether it trains
        or not: before local step `Optimizer.delay` of the next round.

        Args:
          own: The peer's state.
          params: Params that all peers agree on.
          fragment: int32 [], the part of the params that the round exchanged.
        """


class LookaheadFn(Protocol):
    """lookahead(params, own, shared, step) -> params."""

    def __call__(self, params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        """Return the params at which a peer takes its gradient.

        Args:
          params: Params that all peers agree on.
          own: The peer's state.
          shared: The state that is one copy.
          step: The local step, counted as in `AccumulateFn`.
        """


class AccumulateFn(Protocol):
    """accumulate(grads, own, params, step) -> own."""

    def __call__(self, grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        """Return the peer's state after one local step.

        Args:
          grads: Mean gradient of the peer's batch; shapes of `params`.
          own: The peer's state.
          params: Params that all peers agree on.
          step: int32 [], counted from 1. With several local steps in a round float32 [], the number
            of rounds done after this local step: the last one of round 3 has 3.0.
        """


class SendFn(Protocol):
    """send(own, params, shared, step) -> message, own."""

    def __call__(self, own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        """Return the peer's message, once a round, and its state after sending it.

        Args:
          own: The peer's state, after `accumulate`.
          params: Params that all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.

        Returns:
          message: Arrays, whose shapes and dtypes are the same in every round.
          own: The peer's state.
        """


class ReceiveFn(Protocol):
    """receive(messages, peers, params, shared, step) -> updates, shared."""

    def __call__(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return what all peers add to their params, once a round.

        Args:
          messages: A message with a leading axis [peer] on every array.
          peers: Their weights, ages and local steps. The row of an absent peer, whose weight is 0,
            may hold anything, and changes no bit.
          params: Params that all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.

        Returns:
          updates: Shapes of `params`, to be added to them.
          shared: The state that is one copy.
        """


class TakeFn(Protocol):
    """take(merged, params, shared, step) -> updates, shared."""

    def __call__(
        self, merged: Tree, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return what all peers add to their params: `ReceiveFn` after its aggregate.

        Args:
          merged: What the messages of all peers became together; shapes of one.
          params: Params that all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.
        """


class Merge(NamedTuple):
    """`Optimizer.receive` in two parts, for messages too large to have all peers' on a device.

    Except for rounding,

        receive(messages, peers, params, shared, step)
          = take(aggregate of each array of the messages, params, shared, step)

    Attributes:
      aggregate: aggregate(values, weight) of some elements of an array of all peers, on the host;
        see `aggregate.mean_on_host`.
      take: What is left to do.
    """

    aggregate: Callable[[Sequence[np.ndarray], np.ndarray], np.ndarray]
    take: TakeFn


class CompareFn(Protocol):
    """compare(own, message, params, step) -> distance, own."""

    def __call__(
        self, own: Tree, message: Tree, params: Tree, step: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Return the distance of a message from the one that this state would send.

        Serves an audit on other hardware, where bits cannot be equal.

        Args:
          own: The peer's state, after `accumulate`.
          message: Message that the peer sent.
          params: Params that all peers agree on.
          step: int32 [], counted from 1.

        Returns:
          distance: float32 [], as a share of the message's scale; 0 is equal.
          own: The peer's state after sending `message`.
        """


class AreasFn(Protocol):
    """areas(params) -> areas."""

    def __call__(self, params: Tree) -> Tree:
        """Return the number of positions in a block of each parameter; messages do not hold it.

        Args:
          params: Nested dicts of arrays.

        Returns:
          An int in place of each `Coefficients` of a message, 0 for what is sent whole.
        """


def no_align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
    """Return the peer's state as it is: the default `align`."""
    return own


class Optimizer(NamedTuple):
    """Eight pure functions over two states: `own` of each peer, and `shared`, which is one copy.

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

    A peer that takes no step in a round aligns too. `compare` serves an audit and `areas`
    the wire format. No function knows whether peers are rows of an array or machines. Shapes do not
    change when a peer is absent.

    Attributes:
      inner_steps: Local steps of a round.
      fragments: Number of fragments of the params; rounds exchange one each, in turns.
      delay: Local steps of the next round that a peer takes before it needs what was exchanged,
        and aligns; at most inner_steps.
      merge: The parts of `receive`, where it has such.
    """

    init: InitFn
    lookahead: LookaheadFn
    accumulate: AccumulateFn
    send: SendFn
    receive: ReceiveFn
    compare: CompareFn
    areas: AreasFn
    inner_steps: int = 1
    align: AlignFn = no_align
    fragments: int = 1
    delay: int = 0
    merge: Merge | None = None

    @property
    def overlapped(self) -> float:
        """Share of a round's training beside which the messages of the round before travel."""
        return self.delay / self.inner_steps


def inside(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer for a state of peers that has `own` as its attribute `optimizer`.

    What makes such states, `init`, is left to whoever has more in them.
    """
    expect_kind(Optimizer, optimizer=optimizer)

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return optimizer.lookahead(params, own.optimizer, shared, step)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return own._replace(optimizer=optimizer.accumulate(grads, own.optimizer, params, step))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, after = optimizer.send(own.optimizer, params, shared, step)
        return message, own._replace(optimizer=after)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        distance, after = optimizer.compare(own.optimizer, message, params, step)
        return distance, own._replace(optimizer=after)

    def align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        return own._replace(optimizer=optimizer.align(own.optimizer, params, fragment))

    return optimizer._replace(
        lookahead=lookahead if looks_ahead(optimizer) else no_lookahead,
        accumulate=accumulate,
        send=send,
        compare=compare,
        align=no_align if optimizer.align is no_align else align,
    )


def align(optimizer: Optimizer, own: Tree, params: Tree, step: jax.Array) -> Tree:
    """Return the peer's state after it adopts, in round `step`, the result of the round before.

    Args:
      optimizer: The functions.
      own: The peer's state.
      params: Params that all peers agree on.
      step: int32 [], the round, counted from 1; the first has nothing to adopt.
    """
    if optimizer.align is no_align:
        return own

    def take_up(own: Tree) -> Tree:
        return optimizer.align(own, params, (step - 2) % optimizer.fragments)

    return jax.lax.cond(step > 1, take_up, lambda own: own, own)


def align_before(
    optimizer: Optimizer, own: Tree, params: Tree, step: jax.Array, local: jax.Array
) -> Tree:
    """Return the peer's state before a local step: after `align`, where it is due then.

    Args:
      optimizer: The functions.
      own: The peer's state.
      params: Params that all peers agree on.
      step: int32 [], the round, counted from 1.
      local: int32 [], the local step in the round, counted from 0.
    """
    if optimizer.align is no_align:
        return own
    due = local == optimizer.delay
    return jax.lax.cond(due, lambda own: align(optimizer, own, params, step), lambda own: own, own)


def rate(learning_rate: optax.ScalarOrSchedule, step: jax.Array) -> Any:
    """Return the learning rate of a step; the first step is 1."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def group_of(path: KeyPath) -> str | None:
    """Return the top-level name of a parameter."""
    return getattr(path[0], "key", None) if path else None


def no_lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
    """Return the params themselves: the default `lookahead`."""
    return params


def looks_ahead(optimizer: Optimizer) -> bool:
    """Return whether gradients are taken elsewhere than at the params."""
    return optimizer.lookahead is not no_lookahead


def norm_ratio(x: Tree, y: Tree) -> jax.Array:
    """Return the L2 norm of x as a share of y's; finite even if y is zero."""
    ratio: jax.Array = optax.tree.norm(x) / (optax.tree.norm(y) + SMALLEST_NORMAL)
    return ratio


def clip_scale(grads: Tree, max_norm: float | None) -> jax.Array | float:
    """Return the factor that bounds the global L2 norm of gradients, as PyTorch and Psyche have it.

        min(1, max_norm / (||g|| + 1e-6))

    Args:
      grads: A tree of arrays.
      max_norm: The bound; None or 0 gives 1.
    """
    # With `optax.inject_hyperparams` the bound is traced, so no Python branch can depend on it.
    traced = isinstance(max_norm, jax.core.Tracer)
    if max_norm is None or not (traced or max_norm):
        return 1.0
    scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
    return jnp.where(max_norm == 0, 1.0, scale) if traced else scale
