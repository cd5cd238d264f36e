"""What an optimizer is: seven pure functions, and how they compose into an optax transform."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

Tree: TypeAlias = Any  # a pytree of arrays; params are nested dicts
KeyPath: TypeAlias = tuple[Any, ...]  # where a leaf lies in its tree, as jax.tree_util has it


class InitFn(Protocol):
    """init(params) -> own, shared."""

    def __call__(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the state before the first step.

        Args:
          params: Nested dicts of arrays.

        Returns:
          own: What each peer owns, as it is for every peer at first.
          shared: What is one copy, the same for all peers.
        """


class LookaheadFn(Protocol):
    """lookahead(params, own, shared, step) -> params."""

    def __call__(self, params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        """Return the params at which a peer takes its gradient.

        Args:
          params: What all peers agree on.
          own: The peer's state.
          shared: The state that is one copy.
          step: int32 [], counted from 1.
        """


class AccumulateFn(Protocol):
    """accumulate(grads, own, params, step) -> own."""

    def __call__(self, grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        """Return the peer's state after one local batch.

        Args:
          grads: Mean gradient of the peer's batch; shapes of `params`.
          own: The peer's state.
          params: What all peers agree on.
          step: int32 [], counted from 1.
        """


class SendFn(Protocol):
    """send(own, params, shared, step) -> message, own."""

    def __call__(self, own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        """Return the peer's message, once a round, and its state after sending it.

        Args:
          own: The peer's state, after `accumulate`.
          params: What all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.

        Returns:
          message: Arrays, whose shapes and dtypes are the same in every round.
          own: The peer's state.
        """


class ReceiveFn(Protocol):
    """receive(messages, present, params, shared, step) -> updates, shared."""

    def __call__(
        self, messages: Tree, present: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return what all peers add to their params, once a round.

        Args:
          messages: A message with a leading axis [peer] on every array.
          present: bool [peer]; the row of an absent peer may hold anything, and changes no bit.
          params: What all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.

        Returns:
          updates: Shapes of `params`, to be added to them.
          shared: The state that is one copy.
        """


class CompareFn(Protocol):
    """compare(own, message) -> distance, own."""

    def __call__(self, own: Tree, message: Tree) -> tuple[jax.Array, Tree]:
        """Return how far a message lies from the one that this state would send.

        Serves an audit on other hardware, where bits cannot be equal.

        Args:
          own: The peer's state, after `accumulate`.
          message: What the peer sent.

        Returns:
          distance: float32 [], as a share of the message's scale; 0 is equal.
          own: The peer's state after sending `message`.
        """


class AreasFn(Protocol):
    """areas(params) -> areas."""

    def __call__(self, params: Tree) -> Tree:
        """Return how many positions a block of each param has, which a message does not tell.

        Args:
          params: Nested dicts of arrays.

        Returns:
          An int in place of each `Coefficients` of a message, 0 for what is sent whole.
        """


class Optimizer(NamedTuple):
    """Seven pure functions over two states: `own` of each peer, and `shared`, which is one copy.

        own, shared = init(params)
        each round, each peer:
          grads        at lookahead(params, own, shared, step)
          own          = accumulate(grads, own, params, step)
          message, own = send(own, params, shared, step)
        each round, everybody alike:
          updates, shared = receive(messages, present, params, shared, step)

    `compare` serves an audit and `areas` the wire format. No function knows whether peers are rows
    of an array or machines. Shapes do not change when a peer is absent.
    """

    init: InitFn
    lookahead: LookaheadFn
    accumulate: AccumulateFn
    send: SendFn
    receive: ReceiveFn
    compare: CompareFn
    areas: AreasFn


Exchange: TypeAlias = Callable[[Tree, jax.Array], tuple[Tree, Tree]]
"""exchange(message, step) -> sent, received: what this peer sent, and every peer's message with a
leading axis [peer]."""


def all_gather(axis_name: str = "peer") -> Exchange:
    """Return the exchange of peers that are rows of a mesh or vmap axis.

    Args:
      axis_name: Name of the axis.
    """

    def exchange(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del step
        return message, jax.lax.all_gather(message, axis_name)

    return exchange


class OptimizerState(NamedTuple):
    """State of `as_transform`.

    Attributes:
      step: int32 [], the step about to be taken, counted from 1.
      own: The peer's state.
      shared: The state that is one copy.
    """

    step: jax.Array
    own: Tree
    shared: Tree


def as_transform(optimizer: Optimizer, exchange: Exchange) -> optax.GradientTransformation:
    """Compose an optimizer and an exchange into a transform for any jitted step.

    Gradients are to be taken at `optimizer.lookahead(params, state.own, state.shared, state.step)`,
    which is the params themselves except for DisTrO with overlap.

    Args:
      optimizer: The functions.
      exchange: exchange(message, step) -> sent, received, such as `all_gather("peer")`.
    """

    def init(params: Tree) -> OptimizerState:
        own, shared = optimizer.init(params)
        return OptimizerState(jnp.ones((), jnp.int32), own, shared)

    def update(
        updates: Tree, state: optax.OptState, params: Tree | None = None
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


def rate(learning_rate: optax.ScalarOrSchedule, step: jax.Array) -> Any:
    """Return the learning rate of a step; the first step is 1."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def group_of(path: KeyPath) -> str | None:
    """Return the top-level name of a parameter."""
    return getattr(path[0], "key", None) if path else None


def no_lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
    """Return the params themselves: the default `lookahead`."""
    del own, shared, step
    return params


def clip_scale(grads: Tree, max_norm: float | None) -> jax.Array | float:
    """Return the factor that bounds the global L2 norm of gradients, as PyTorch and Psyche have it.

        min(1, max_norm / (||g|| + 1e-6))

    Args:
      grads: A tree of arrays.
      max_norm: The bound; None or 0 gives 1.
    """
    if not max_norm:
        return 1.0
    return jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
