"""An optimizer whose messages are rounded before they are sent."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipeline.optim.expect import expect_kind, expect_share
from pipeline.optim.optimizer import Optimizer, RoundPeers, Tree, norm_ratio
from pipeline.optim.quantize.quantizer import Quantizer


class QuantizedState(NamedTuple):
    """What each peer owns in `quantized`.

    Attributes:
      own: `own` of the optimizer.
      error: What rounding has left out so far, in the shapes of the params; or nothing.
    """

    own: Tree
    error: Tree


def quantized(optimizer: Optimizer, quantizer: Quantizer, error_feedback: float = 0.0) -> Optimizer:
    """Return the optimizer with messages that the quantizer has rounded.

    With x the message that the optimizer would send:

        x  <- x + error_feedback * e
        q   = encode(x), which is sent
        e  <- x - decode(q)

    Everybody's optimizer, the sender's too, receives what the codes stand for.

    Args:
      optimizer: Sends float32 arrays in the shapes of the params, and looks at nothing but its own
        state for them, as those of `dense`.
      quantizer: Rounds each array.
      error_feedback: Share of what was left out that is added to the next message, 0 to 1; with 0
        no e is kept.

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014
    """
    expect_kind(Optimizer, optimizer=optimizer)
    expect_kind(Quantizer, quantizer=quantizer)
    expect_share("error_feedback", error_feedback)

    decode, beyond = partial(_decode, quantizer), partial(_beyond, quantizer)

    def kept(after: Tree, error: Callable[[], Tree]) -> QuantizedState:
        return QuantizedState(after, error() if error_feedback else optax.EmptyState())

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        zero = partial(jnp.zeros_like, dtype=jnp.float32)
        return kept(own, lambda: jax.tree.map(zero, params)), shared

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
        return message, kept(after, left_out)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        decoded = jax.vmap(partial(decode, params=params), axis_size=len(peers.weight))(messages)
        return optimizer.receive(decoded, peers, params, shared, step)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        x, after = exact(own, params, step)
        decoded = decode(message, params)

        far = norm_ratio(jax.tree.map(beyond, x, decoded), x)
        return far, kept(after, partial(jax.tree.map, jnp.subtract, x, decoded))

    def areas(params: Tree) -> Tree:
        codes = jax.eval_shape(lambda params: jax.tree.map(quantizer.encode, params), params)
        return jax.tree.map(lambda _: 0, codes)

    return optimizer._replace(
        init=init, accumulate=accumulate, send=send, receive=receive, compare=compare, areas=areas
    )


def _decode(quantizer: Quantizer, message: Tree, params: Tree) -> Tree:
    return jax.tree.map(lambda theta, code: quantizer.decode(code, theta.shape), params, message)


def _beyond(quantizer: Quantizer, x: jax.Array, found: jax.Array) -> jax.Array:
    """Return how much farther `found` lies from x than rounding alone would put it."""
    return jnp.maximum(jnp.abs(found - x) - quantizer.rounding(x), 0.0)
