"""How the values of all peers become one: by default their mean.

Each optimizer takes an `aggregate`, and reduces the values that peers sent by nothing else.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree

# Larger values are scaled down before they are summed over the peers, or a finite message of a
# liar could make the sum infinite, and with it everybody's params.
LARGE, FEW = 2.0**100, 2.0**-24


class AggregateFn(Protocol):
    """aggregate(values, weight) -> tree."""

    def __call__(self, values: Tree, weight: jax.Array) -> Tree:
        """Return one tree for the values of all peers.

        Args:
          values: Arrays with a leading axis [peer]. A value of weight 0 may be anything, NaN
            included, and changes no bit.
          weight: int32 or bool [peer]; or bool in the shape of the values, if peers sent only some
            of the elements.

        Returns:
          Shapes of a peer's values; zeros where all weights are 0.
        """


def mean(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean over peers by their weights; see `AggregateFn`."""
    # Shares of the largest weight: equal weights become 1, and so have the bits of a plain mean.
    share = weight / jnp.maximum(jnp.max(weight), 1)
    total = jnp.maximum(jnp.sum(share, axis=0), 1.0)

    def leaf_mean(x: jax.Array) -> jax.Array:
        share_P = share.reshape(*share.shape, *[1] * (x.ndim - share.ndim))
        return quotient(jnp.where(share_P > 0, share_P * x, 0.0), total)

    return jax.tree.map(leaf_mean, values)


def quotient(x: jax.Array, count: jax.Array) -> jax.Array:
    """Return the sum over the leading axis divided by a count, finite even if the sum is not."""
    few = few_of(x, axis=0)
    return jnp.sum(x * few, axis=0) / count / few


def few_of(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the factor by which x may be summed: 1, and less where x is near float32's limit."""
    # It depends on x, because XLA moves a product with a constant behind the sum.
    return jnp.where(jnp.max(jnp.abs(x), axis=axis, initial=0.0) > LARGE, FEW, 1.0)


def equally(aggregate: AggregateFn) -> AggregateFn:
    """Return the same aggregate with equal weights for all present peers."""

    def aggregate_equally(values: Tree, weight: jax.Array) -> Tree:
        return aggregate(values, weight > 0)

    return aggregate_equally


EQUAL_MEAN = equally(mean)


def mean_on_host(values: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Return the `mean` of a slice of each peer's values, on the host.

    It sums in float32, one peer after the other, so that an element's bits do not depend on how
    the array was sliced. XLA sums in an order that depends on shapes, so last bits may differ
    from `mean`.

    Args:
      values: Float32 arrays of one shape, by peer. An array of weight 0 is not read.
      weight: Integers or bool [peer].
    """
    share = weight.astype(np.float32) / np.float32(max(weight.max(), 1))
    count = max(share.sum(), np.float32(1))

    def total(few: np.float32) -> np.ndarray:
        found = np.zeros_like(values[0])
        for x, of_peer in zip(values, share * few, strict=True):
            if of_peer:
                found += x if of_peer == 1 else of_peer * x
        found /= count
        return found

    with np.errstate(over="ignore"):
        found = total(np.float32(1))
    if (beyond := ~np.isfinite(found)).any():
        found[beyond] = total(np.float32(FEW))[beyond] / np.float32(FEW)
    return found


def _equal_mean_on_host(values: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    return mean_on_host(values, weight > 0)


ON_HOST = {mean: mean_on_host, EQUAL_MEAN: _equal_mean_on_host}
"""Each `AggregateFn` that also works on the host, slice by slice, with its host version."""
