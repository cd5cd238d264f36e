"""SparseLoCo: local steps, and then the largest elements of the pseudogradients, in two bits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, mean
from lockstep.optim.compressed import dct
from lockstep.optim.compressed.compressor import Coefficients, Compressor
from lockstep.optim.local.local_steps import local_steps
from lockstep.optim.optimizer import KeyPath, Optimizer, RoundPeers, Tree
from lockstep.optim.quantize import level_of, pack, two_levels, unpack


class Largest(NamedTuple):
    """What a peer of SparseLoCo sends of a parameter; N blocks, K elements of each. Or its areas.

    Attributes:
      level: The magnitudes of small and of large elements: float32 [N, 2].
      large: A bit for each element that is sent, set where it is large: uint8.
      sent: Positions and signs.
    """

    level: Tree
    large: Tree
    sent: Tree


def sparseloco(
    inner: Optimizer,
    *,
    inner_steps: int,
    outer_learning_rate: float,
    error_feedback: float,
    topk: int,
    chunk: int,
    stacked: tuple[str, ...] = (),
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return SparseLoCo: peers send their largest elements, and keep the rest for later.

    With theta_p the local params of peer p, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        e_p    <- error_feedback * e_p + theta - theta_p
        q_p     = the topk elements of largest magnitude of each block of e_p, as `two_levels` has
                  them: a sign, and one of two magnitudes
        e_p    <- e_p - q_p
        theta  <- theta - outer_learning_rate * (mean over present peers of q_p)

    An element that a peer does not send counts as zero. With 128 of 4,096, a message takes
    about 9 bits for each element that is sent.

    That is the paper's mean. The code that Templar trains with (tplr-ai/templar, src/tplr/
    compress.py at 0118981) differs: its mean of an element is over the peers that sent it, so one
    that few peers send moves farther; it scales messages whose norm exceeds the peers' median down
    to it; and the levels are those of a whole parameter, not of a block.

    SparseLoCo's inner optimizer is AdamW, of 15 to 250 steps; its outer learning rate is 1, its
    error_feedback 0.95, and it sends 128 elements of each block of 64 x 64 (`topk`, `chunk`; leaves
    of the groups in `stacked` carry a leading layer axis).

    References:
      Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo,
        https://arxiv.org/abs/2508.15706
    """
    expected = "a number above 0, at most 1"
    expect.number("error_feedback", error_feedback, lambda x: 0 < x <= 1, expected)
    expect.rates(outer_learning_rate=outer_learning_rate)
    expect.aggregate(aggregate)
    compressor = Compressor(topk, chunk, quantize_1bit=True, stacked=stacked)
    outer = _error_feedback(outer_learning_rate, error_feedback, compressor, aggregate)
    return local_steps(inner, outer, inner_steps)


def _error_feedback(
    learning_rate: float, error_feedback: float, compressor: Compressor, aggregate: AggregateFn
) -> Optimizer:
    """Return SparseLoCo's outer optimizer, of pseudogradients as gradients; its own state is e."""

    def init(params: Tree) -> tuple[Tree, Tree]:
        e = jax.tree.map(lambda theta: jnp.zeros(theta.shape, jnp.float32), params)
        return e, optax.EmptyState()

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return jax.tree.map(lambda e, g: error_feedback * e + g, own, grads)

    def encode(own: Tree) -> Tree:
        return jax.tree.map_with_path(lambda path, e: _encode(compressor, path, e), own)

    def decode(message: Tree, params: Tree) -> Tree:
        return jax.tree.map_with_path(
            lambda path, theta, sent: _decode(compressor.layout(path, theta), sent), params, message
        )

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message = encode(own)
        return message, jax.tree.map(jnp.subtract, own, decode(message, params))

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        decoded = jax.vmap(partial(decode, params=params), axis_size=len(peers.weight))(messages)
        agreed = aggregate(decoded, peers.weight)
        return jax.tree.map(lambda q: -learning_rate * q, agreed), shared

    def areas(params: Tree) -> Tree:
        return jax.tree.map(lambda area: Largest(0, 0, area), compressor.areas(params))

    return Optimizer(init, accumulate, send, receive, areas)


def _encode(compressor: Compressor, path: KeyPath, e: jax.Array) -> Largest:
    sent = compressor.select(path, e)
    assert isinstance(sent, Coefficients)
    magnitude_NK = jnp.abs(dct.take(e, compressor.layout(path, e), sent.index_NK))
    level_N2, large_NK = two_levels(magnitude_NK)
    return Largest(level_N2, pack(large_NK, large_NK.size, 1), sent)


def _decode(cut: dct.Layout, message: Largest) -> jax.Array:
    index_NK, negative_NK = message.sent
    large_NK = unpack(message.large, index_NK.size, 1, index_NK.shape[1])
    magnitude_NK = level_of(message.level, large_NK)
    return dct.put(index_NK, jnp.where(negative_NK, -magnitude_NK, magnitude_NK), cut)
