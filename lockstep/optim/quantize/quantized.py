"""An optimizer whose messages are rounded before they are sent."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim.expect import expect_kind, expect_share
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree, norm_ratio
from lockstep.optim.quantize.quantizer import Quantizer


class QuantizedState(NamedTuple):
    """A peer's own state in `quantized`.

    Attributes:
      own: `own` of the optimizer.
      error: Sum of what rounding left out, in the shapes of the params; empty without feedback.
    """

    own: Tree
    error: Tree


def quantized(optimizer: Optimizer, quantizer: Quantizer, error_feedback: float = 0.0) -> Optimizer:
    """Return the optimizer with messages that the quantizer has rounded.

    With x the message that the optimizer would send:

        x  <- x + error_feedback * e
        q   = encode(x), which is sent
        e  <- x - decode(q)

    All peers, the sender too, receive what the codes stand for.

    Args:
      optimizer: Sends float32 arrays in the shapes of the params, which depend on its own state
        alone, as those of `dense` do.
      quantizer: Rounds each array.
      error_feedback: Share of what was left out that is added to the next message, 0 to 1; 0 keeps
        no e.

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014
    """
    expect_kind(Optimizer, optimizer=optimizer)
    expect_kind(Quantizer, quantizer=quantizer)
    expect_share("error_feedback", error_feedback)

    decode, beyond = partial(_decode, quantizer), partial(_beyond, quantizer)

    def with_error(after: Tree, error: Callable[[], Tree]) -> QuantizedState:
        return QuantizedState(after, error() if error_feedback else optax.EmptyState())

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        zero = partial(jnp.zeros_like, dtype=jnp.float32)
        return with_error(own, lambda: jax.tree.map(zero, params)), shared

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return own._replace(own=optimizer.accumulate(grads, own.own, params, step))

    def exact(own: QuantizedState, params: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        """Return x, and the optimizer's state after sending."""
        x, after = optimizer.send(own.own, params, optax.EmptyState(), step)
        if error_feedback:
            x = jax.tree.map(lambda x, e: x + error_feedback * e, x, own.error)
        return x, after

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        x, after = exact(own, params, step)
        message = jax.tree.map(quantizer.encode, x)
        left_out = partial(jax.tree.map, jnp.subtract, x, decode(message, params))
        return message, with_error(after, left_out)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        decoded = jax.vmap(partial(decode, params=params), axis_size=len(peers.weight))(messages)
        return optimizer.receive(decoded, peers, params, shared, step)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        x, after = exact(own, params, step)
        decoded = decode(message, params)
        # Honest machines may round a value near a half either way, so only an error beyond that of
        # rounding counts.
        distance = norm_ratio(jax.tree.map(beyond, x, decoded), x)
        return distance, with_error(after, partial(jax.tree.map, jnp.subtract, x, decoded))

    def areas(params: Tree) -> Tree:
        codes = jax.eval_shape(lambda params: jax.tree.map(quantizer.encode, params), params)
        return jax.tree.map(lambda _: 0, codes)

    return optimizer._replace(
        init=init, accumulate=accumulate, send=send, receive=receive, compare=compare, areas=areas,
        merge=None,
    )  # fmt: skip


def _decode(quantizer: Quantizer, message: Tree, params: Tree) -> Tree:
    return jax.tree.map(lambda theta, code: quantizer.decode(code, theta.shape), params, message)


def _beyond(quantizer: Quantizer, x: jax.Array, found: jax.Array) -> jax.Array:
    """Return by how much the error of `found` exceeds the error of rounding x."""
    return jnp.maximum(jnp.abs(found - x) - quantizer.rounding(x), 0.0)
