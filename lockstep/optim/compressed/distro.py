"""DisTrO: peers exchange a few DCT coefficients of their momentum, and step by the sign."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, mean
from lockstep.optim.compressed.compressor import (
    Coefficients,
    Compressor,
    Selection,
    SomeBlocks,
    coefficients_of,
)
from lockstep.optim.directions import near_one
from lockstep.optim.optimizer import KeyPath, Optimizer, RoundPeers, Tree, clip_scale, rate, scaled
from lockstep.optim.transform import Exchange, as_transform


@dataclass(frozen=True)
class CompressedMomentum:
    """DisTrO's momentum, a few of whose coefficients peers exchange; both its orders use it.

    Attributes:
      learning_rate: A schedule of the step, counted from 1, or a constant. It scales the gradient
        on its way into `delta` as well as the step.
      compressor: Chooses the coefficients to send.
      compression_decay: Decay of delta per round, in [0, 1].
      weight_decay: Decoupled weight decay, per unit of a parameter's own step size.
      clip_grad_norm: Largest global L2 norm of a peer's gradient; None or 0 for no clipping.
      step_scale: Factor of the steps of a group of params, 1 where it is not named; a group is a
        top-level name of the params, such as "layers".
      aggregate: Takes the place of the mean over the peers that sent a coefficient.
    """

    learning_rate: optax.ScalarOrSchedule
    compressor: Compressor
    compression_decay: float
    weight_decay: float = 0.0
    clip_grad_norm: float | None = None
    step_scale: Mapping[str, float] = field(default_factory=dict)
    aggregate: AggregateFn = mean

    def __post_init__(self) -> None:
        expect.learning_rate(self.learning_rate)
        expect.kind(Compressor, compressor=self.compressor)
        expect.share("compression_decay", self.compression_decay)
        expect.rates(weight_decay=self.weight_decay)
        expect.clip(self.clip_grad_norm)
        expect.by_group(expect.rates, step_scale=self.step_scale)
        expect.aggregate(self.aggregate)

    def zeros(self, params: Tree) -> Tree:
        """Return DisTrO's first delta, of zeros."""
        layout = self.compressor.layout
        return jax.tree.map_with_path(
            lambda path, theta: jnp.zeros(layout(path, theta).shape, jnp.float32), params
        )

    def rate(self, step: jax.Array) -> Any:
        """Return DisTrO's learning rate in a step."""
        return rate(self.learning_rate, step)

    def add(self, delta: Tree, grads: Tree, lr: jax.Array | float) -> Tree:
        """Return DisTrO's delta: compression_decay * delta + lr * clip(grads), as coefficients."""

        def decayed_and_added(path: KeyPath, g: jax.Array, delta: jax.Array) -> jax.Array:
            return self.compression_decay * delta + weight * self.compressor.encode(path, g)

        weight = lr * clip_scale(grads, self.clip_grad_norm)  # one number: no pass over gradients
        return jax.tree.map_with_path(decayed_and_added, grads, delta)

    def select(self, delta: Tree) -> Tree:
        """Return DisTrO's message: what the compressor sends of each parameter's delta."""
        return jax.tree.map_with_path(self.compressor.select, delta)

    def remove(self, delta: Tree, sent: Tree) -> Tree:
        """Return DisTrO's delta without the positions that were sent."""
        return jax.tree.map_with_path(self.compressor.remove, delta, sent)

    def directions(self, params: Tree, messages: Tree, present: jax.Array) -> Tree:
        """Return the direction of DisTrO's step by parameter, decoded from all peers' messages."""

        def decoded(path: KeyPath, theta: jax.Array, message: Selection) -> jax.Array:
            agreed = self.compressor.aggregate(path, theta, message, present, self.aggregate)
            # Only its direction is used, so any scale will do; near 1, decoding overflows nowhere.
            agreed = agreed * near_one(agreed)
            return jnp.sign(self.compressor.decode(path, agreed))

        return jax.tree.map_with_path(decoded, params, messages)

    def lookahead(self, params: Tree, delta: Tree, step: jax.Array) -> Tree:
        """Return the params after a step of DisTrO in which all peers' deltas equal this one."""

        def stepped(path: KeyPath, theta: jax.Array, delta: jax.Array) -> Any:
            lr = scaled(self.step_scale, path, self.rate(step - 1))
            return theta - lr * jnp.sign(self.compressor.decode(path, delta))

        return jax.tree.map_with_path(stepped, params, delta)

    def updates(self, params: Tree, directions: Tree, step: jax.Array, lr_step: jax.Array) -> Tree:
        """Return DisTrO's -scale * (lr(lr_step) * direction + lr(step) * weight_decay * theta)."""
        rates = self.rate(lr_step), self.rate(step) * self.weight_decay

        def update(path: KeyPath, theta: jax.Array, d: jax.Array) -> Any:
            lr, decay = (scaled(self.step_scale, path, x) for x in rates)
            return -(lr * d + decay * theta)

        return jax.tree.map_with_path(update, params, directions)


class DistroState(NamedTuple):
    """A peer's own state in `distro`.

    Attributes:
      delta: The momentum's coefficients; shapes of the params, float32.
    """

    delta: Tree


def distro(momentum: CompressedMomentum, overlap: int = 0) -> Optimizer:
    """Return DisTrO in DeMo's order: a round's messages are applied in that round.

    With g_p the (clipped) gradient of peer p, lr(t) the learning rate of step t, and D(.) the
    inverse DCT, per block:

        q_p(t) = top-k by magnitude of DCT(delta_p)
        Q(t)   = mean over the peers that sent a coefficient, of q_p(t) or of sign(q_p(t))

        g_p at theta
        delta_p <- compression_decay * delta_p + lr(t) * g_p;  send q_p(t);  delta_p -= D(q_p(t))
        theta   <- theta * (1 - lr(t) * weight_decay) - lr(t) * sign(D(Q(t)))

    A peer removes what it selected with full values, whatever bits the wire carries, as Psyche
    does. No inverse transform is needed except Q's.

    `overlap` says how messages travel: 0, before the round ends; 1 or 2, while the next round is
    computed, as Psyche's `train` example or its network applies them.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
      Psyche, https://github.com/PsycheFoundation/psyche, shared/modeling/src/distro.rs
    """
    expect.kind(CompressedMomentum, momentum=momentum)
    expect.integer("overlap", overlap, lambda x: x in (0, 1, 2), "0, 1 or 2")
    if overlap:
        return _overlapped(momentum, overlap)

    def init(params: Tree) -> tuple[Tree, Tree]:
        return DistroState(momentum.zeros(params)), optax.EmptyState()

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return DistroState(momentum.add(own.delta, grads, momentum.rate(step)))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message = momentum.select(own.delta)
        return message, DistroState(momentum.remove(own.delta, _positions(message)))

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        directions = momentum.directions(params, messages, peers.weight > 0)
        return momentum.updates(params, directions, step, step), shared

    areas = momentum.compressor.areas
    return Optimizer(init, accumulate, send, receive, areas)


class OverlappedState(NamedTuple):
    """A peer's own state in DisTrO with `overlap` 1 or 2.

    Attributes:
      delta: The momentum's coefficients; shapes of the params, float32.
      sent: index_NK of the last message, still to be removed from delta.
    """

    delta: Tree
    sent: Tree


class WaitingDirection(NamedTuple):
    """The shared state in DisTrO with `overlap` 1 or 2.

    Attributes:
      direction: The last round's direction, still to be applied; shapes of the params.
    """

    direction: Tree


def _overlapped(momentum: CompressedMomentum, overlap: int) -> Optimizer:
    """Return DisTrO in Psyche's order: messages travel while the next round is computed.

    A peer takes its gradient at the params that its own delta predicts. It removes what it sent a
    round later, before the decay, as Psyche's `generate` does. With the names of `distro`:

        g_p at theta - lr(t-1) * sign(delta_p)
        delta_p <- compression_decay * (delta_p - D(q_p(t-1))) + lr(t) * g_p;  send q_p(t)
        theta   <- theta * (1 - lr(t) * weight_decay) - lr(s) * sign(D(Q(t-1)))

    with s = t for overlap 1, Psyche's `train` example, which applies Q(t-1) at the end of round t,
    and s = t + 1 for 2, Psyche's network, which applies it as round t + 1 begins. So both train
    round t on params that include Q up to t - 2, and differ only in a step's learning rate.
    The last round's Q is lost, as in Psyche.
    """

    def init(params: Tree) -> tuple[Tree, Tree]:
        delta = momentum.zeros(params)
        # delta is zero, so whatever positions the first round removes, nothing is lost
        sent = jax.tree.map_with_path(momentum.compressor.first_positions, params)
        zeros = jax.tree.map(lambda theta: jnp.zeros(theta.shape, jnp.int8), params)
        return OverlappedState(delta, sent), WaitingDirection(zeros)

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return momentum.lookahead(params, own.delta, step)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        lr, delta = momentum.rate(step), momentum.remove(own.delta, own.sent)
        return own._replace(delta=momentum.add(delta, grads, lr))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message = momentum.select(own.delta)
        return message, own._replace(sent=_positions(message))

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        directions = momentum.directions(params, messages, peers.weight > 0)
        waiting = jax.tree.map(lambda d: d.astype(jnp.int8), directions)  # as many as params
        lr_step = step + (overlap == 2)
        return momentum.updates(params, shared.direction, step, lr_step), WaitingDirection(waiting)

    areas = momentum.compressor.areas
    return Optimizer(init, accumulate, send, receive, areas, lookahead, delay=1)


def _positions(message: Tree) -> Tree:
    """Return index_NK of each parameter of a message of DisTrO."""
    return jax.tree.map(
        lambda sent: coefficients_of(sent).index_NK,
        message,
        is_leaf=lambda node: isinstance(node, Coefficients | SomeBlocks),
    )


def demo(
    learning_rate: optax.ScalarOrSchedule,
    compression_decay: float,
    compression_topk: int,
    compression_chunk: int,
    weight_decay: float,
    exchange: Exchange,
) -> optax.GradientTransformation:
    """Return decoupled momentum optimization, as the reference of the paper's authors has it.

    With peers p, learning rate lr and D the inverse of the chunked DCT:

        theta   <- theta * (1 - lr * weight_decay)
        delta_p <- compression_decay * delta_p + lr * g_p
        q_p      = top-k by magnitude of DCT(delta_p), per block
        delta_p <- delta_p - D(q_p)
        theta   <- theta - lr * sign(D(mean over the peers that sent a coefficient, of q_p))

    Values are sent in float32; `distro` can round them, or send their signs only. The state differs
    between peers, the updates are the same for all. With `optax.inject_hyperparams`, name as static
    what is not a number to be changed:
    `static_args=("compression_topk", "compression_chunk", "exchange")`.

    The paper has a compression_decay of 0.999, a compression_topk of 32 and a compression_chunk of
    64. The exchange is `all_gather("peer")` under `vmap(axis_name="peer")` or `shard_map`, or
    `alone`; see `as_transform`.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
    """
    expect.counts(compression_topk=compression_topk, compression_chunk=compression_chunk)
    compressor = Compressor(compression_topk, compression_chunk, False, jnp.float32)
    momentum = CompressedMomentum(learning_rate, compressor, compression_decay, weight_decay)
    return as_transform(distro(momentum), exchange)
