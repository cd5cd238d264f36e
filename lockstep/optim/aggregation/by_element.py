"""Aggregates that treat each element by itself.

In each of them a present peer counts once, whatever its weight.
"""

import jax
import jax.numpy as jnp

from lockstep.optim.aggregation.aggregate import AggregateFn, quotient
from lockstep.optim.optimizer import Tree


def median(values: Tree, weight: jax.Array) -> Tree:
    """Return the median of each element, half-way between the middle two of an even number.

    If fewer than half of an element's senders lie, it stays within the honest values.

    References:
      Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
        https://arxiv.org/abs/1803.01498
    """

    def leaf_median(x: jax.Array) -> jax.Array:
        return middle(x, is_sent(x, weight))

    return jax.tree.map(leaf_median, values)


def trimmed_mean(liars: int) -> AggregateFn:
    """Return the mean of each element without its `liars` largest and smallest values.

    If 2 * liars peers or fewer sent the element, fewer are left out, so that one or two remain.

    References:
      Yin et al., as in `median`
    """

    def trim(values: Tree, weight: jax.Array) -> Tree:
        def leaf_trimmed(x: jax.Array) -> jax.Array:
            ranked_P, count = _ranked(x, is_sent(x, weight))
            cut = jnp.minimum(liars, jnp.maximum(count - 1, 0) // 2)
            rank_P = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
            kept_P = (rank_P >= cut) & (rank_P < count - cut)
            return quotient(jnp.where(kept_P, ranked_P, 0.0), jnp.maximum(count - 2 * cut, 1))

        return jax.tree.map(leaf_trimmed, values)

    return trim


def min_support(liars: int) -> AggregateFn:
    """Return the mean of each element over its senders, zero where `liars` or fewer sent it.

    So liars alone move no element that nobody else sends.
    """

    def drop_unsupported(values: Tree, weight: jax.Array) -> Tree:
        def leaf_supported(x: jax.Array) -> jax.Array:
            sent_P = is_sent(x, weight)
            count = jnp.sum(sent_P, axis=0)
            found = quotient(jnp.where(sent_P, x, 0.0), jnp.maximum(count, 1))
            return jnp.where(count > liars, found, 0.0)

        return jax.tree.map(leaf_supported, values)

    return drop_unsupported


def peer_mean(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean of each element over all present peers; an unsent element counts as zero.

    So a lone sender does not decide an element, but has one vote among all peers.
    """

    def leaf_peer_mean(x: jax.Array) -> jax.Array:
        sent_P = is_sent(x, weight)
        present = jnp.sum(jnp.any(sent_P.reshape(len(x), -1), axis=1))
        return quotient(jnp.where(sent_P, x, 0.0), jnp.maximum(present, 1))

    return jax.tree.map(leaf_peer_mean, values)


def is_sent(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return which elements count, bool in the shape of x; see `AggregateFn`."""
    sent_P = weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim)) > 0
    return jnp.broadcast_to(sent_P, x.shape)


def middle(x: jax.Array, sent_P: jax.Array) -> jax.Array:
    """Return the median over the leading axis of the values that count; 0 if none does."""
    ranked_P, count = _ranked(x, sent_P)
    low, high = jnp.maximum(count - 1, 0) // 2, count // 2
    pair = jnp.take_along_axis(ranked_P, jnp.concatenate([low[None], high[None]]), axis=0)
    return quotient(jnp.where(count > 0, pair, 0.0), jnp.float32(2))


def _ranked(x: jax.Array, sent_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the values in ascending order, uncounted ones last, and how many count."""
    return jnp.sort(jnp.where(sent_P, x, jnp.inf), axis=0), jnp.sum(sent_P, axis=0)
