"""What an optimizer is: seven pure functions, and how they compose into an optax transform."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

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
          step: As of `AccumulateFn`.
        """


class AccumulateFn(Protocol):
    """accumulate(grads, own, params, step) -> own."""

    def __call__(self, grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        """Return the peer's state after one local step.

        Args:
          grads: Mean gradient of the peer's batch; shapes of `params`.
          own: The peer's state.
          params: What all peers agree on.
          step: int32 [], counted from 1; with several local steps in a round float32, the rounds
            that are done after this one, so that the last one of round 3 sees 3.0.
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
    """receive(messages, weight, params, shared, step) -> updates, shared."""

    def __call__(
        self, messages: Tree, weight: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return what all peers add to their params, once a round.

        Args:
          messages: A message with a leading axis [peer] on every array.
          weight: int32 [peer], the sequences that each was assigned, never its own word; 0 where it
            is absent: then its row may hold anything, and changes no bit.
          params: What all peers agree on.
          shared: The state that is one copy.
          step: int32 [], counted from 1.

        Returns:
          updates: Shapes of `params`, to be added to them.
          shared: The state that is one copy.
        """


class CompareFn(Protocol):
    """compare(own, message, params, step) -> distance, own."""

    def __call__(
        self, own: Tree, message: Tree, params: Tree, step: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Return how far a message lies from the one that this state would send.

        Serves an audit on other hardware, where bits cannot be equal.

        Args:
          own: The peer's state, after `accumulate`.
          message: What the peer sent.
          params: What all peers agree on.
          step: int32 [], counted from 1.

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
          inner_steps times:
            grads      at lookahead(params, own, shared, step)
            own        = accumulate(grads, own, params, step)
          message, own = send(own, params, shared, step)
        each round, everybody alike:
          updates, shared = receive(messages, weight, params, shared, step)

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
    inner_steps: int = 1


Exchange: TypeAlias = Callable[[Tree, jax.Array], tuple[Tree, Tree]]
"""exchange(message, step) -> sent, received: what this peer sent, and every peer's message with a
leading axis [peer]."""


def all_gather(axis_name: str = "peer", *, to: str = "varying") -> Exchange:
    """Return the exchange of peers that are rows of a mesh or vmap axis.

    Args:
      axis_name: Name of the axis.
      to: As of `jax.lax.all_gather`. With "invarying", `shard_map` as it is by default, which
        checks it, knows that updates are the same for all: params can leave it as one copy.
    """

    def exchange(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del step
        return message, jax.lax.all_gather(message, axis_name, to=to)

    return exchange


def alone(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
    """Exchange nothing: the only peer there is receives what it sends."""
    del step
    return message, jax.tree.map(lambda x: x[None], message)


class OptimizerState(NamedTuple):
    """State of `as_transform`.

    Attributes:
      count: int32 [], the local steps taken.
      own: The peer's state.
      shared: The state that is one copy.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of that name
    own: Tree
    shared: Tree


def as_transform(optimizer: Optimizer, exchange: Exchange) -> optax.GradientTransformation:
    """Compose an optimizer and an exchange into a transform for any jitted step.

    Gradients are to be taken at `optimizer.lookahead(params, state.own, state.shared,
    next_step(optimizer, state.count))`, which is the params themselves except with local steps, and
    for DisTrO with overlap. With several local steps in a round, the last one alone exchanges, and
    updates of the others are zero; under `shard_map` that takes `check_vma=False`.

    Peers have equal weights. One whose gradient has an infinity or a NaN counts as absent in that
    step, and its own state stays as it was. `optax.apply_if_finite` around this would decide for
    each peer alone: their params would come apart.

    With `optax.inject_hyperparams`, wrap what is to be changed:

        def tx(learning_rate, weight_decay):
            return as_transform(distro(CompressedMomentum(learning_rate, ...)), exchange)

        tx = optax.inject_hyperparams(tx)(learning_rate=0.01, weight_decay=0.1)

    Args:
      optimizer: The functions.
      exchange: exchange(message, step) -> sent, received, such as `all_gather("peer")`, or `alone`.
        Beside the optimizer's message it gets that peer's weight.
    """

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
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        taken = optimizer.accumulate(grads, own, params, next_step(optimizer, count))

        def end_round() -> tuple[Tree, Tree, Tree]:
            step = count // optimizer.inner_steps + 1
            message, after = optimizer.send(taken, params, shared, step)
            after = jax.tree.map(partial(jnp.where, finite), after, own)
            _, (received, weight) = exchange((message, finite.astype(jnp.int32)), step)
            steps, agreed = optimizer.receive(received, weight, params, shared, step)
            return steps, after, agreed

        def go_on() -> tuple[Tree, Tree, Tree]:
            still = jax.tree.map(jnp.zeros_like, jax.eval_shape(end_round)[0])
            return still, jax.tree.map(partial(jnp.where, finite), taken, own), shared

        if optimizer.inner_steps == 1:
            steps, own, shared = end_round()
        else:
            last = (count + 1) % optimizer.inner_steps == 0
            steps, own, shared = jax.lax.cond(last, end_round, go_on)
        steps = flatten_dict(steps)
        updates = jax.tree.map_with_path(lambda path, _: steps[_names(path)], updates)
        return updates, OptimizerState(count + 1, own, shared)

    return optax.GradientTransformation(init, update)


def next_step(optimizer: Optimizer, count: jax.Array) -> jax.Array:
    """Return the `step` that the functions of a local step see after `count` local steps."""
    return count + 1 if optimizer.inner_steps == 1 else (count + 1) / optimizer.inner_steps


def _nested(tree: Tree) -> Tree:
    """Return the leaves of any tree, such as a module's state, in nested dicts."""
    return unflatten_dict({_names(path): x for path, x in jax.tree.leaves_with_path(tree)})


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("",)


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
    traced = isinstance(max_norm, jax.core.Tracer)
    if max_norm is None or not (traced or max_norm):
        return 1.0
    scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
    return jnp.where(max_norm == 0, 1.0, scale) if traced else scale


def expect(name: str, value: Any, within: Callable[[Any], bool], wanted: str) -> None:
    """Check a setting, unless it is traced, as `optax.inject_hyperparams` does.

    Raises:
      ValueError: It is not within what is wanted.
    """
    if not isinstance(value, jax.core.Tracer) and not within(value):
        raise ValueError(f"{name} is {value!r}, expected {wanted}")


def expect_decay(name: str, value: Any) -> None:
    """Check a setting that lies in [0, 1): with 1, a mean of all that ever was would be of none."""
    expect(name, value, lambda x: 0 <= x < 1, "a number from 0, below 1")


def expect_rates(**settings: Any) -> None:
    """Check settings, by name, that are from 0; None is absent."""
    for name, value in settings.items():
        expect(name, value, lambda x: x is None or x >= 0, "a number from 0")
