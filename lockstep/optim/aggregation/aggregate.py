"""How the values of all peers become one: by default their mean.

Each optimizer takes an `aggregate`, and reduces the values that peers sent by nothing else.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree

LARGE, FEW = 2.0**100, 2.0**-24  # what is larger is scaled before it is summed over the peers


class AggregateFn(Protocol):
    """aggregate(values, weight) -> tree."""

    def __call__(self, values: Tree, weight: jax.Array) -> Tree:
        """Return one tree for the values of all peers.

        Args:
          values: Arrays with a leading axis [peer]. What has the weight 0 may be anything, NaN
            included, and changes no bit.
          weight: int32 or bool [peer]; or bool in the shape of the values, where peers have sent
            some of the elements only.

        Returns:
          Shapes of a peer's values; zeros where all weights are 0.
        """


def mean(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean over peers by their weights; see `AggregateFn`."""
    share = weight / jnp.maximum(jnp.max(weight), 1)  # equal weights are 1: bits of a plain mean
    total = jnp.maximum(jnp.sum(share, axis=0), 1.0)

    def of_leaf(x: jax.Array) -> jax.Array:
        share_P = share.reshape(*share.shape, *[1] * (x.ndim - share.ndim))
        return quotient(jnp.where(share_P > 0, share_P * x, 0.0), total)

    return jax.tree.map(of_leaf, values)


def quotient(x: jax.Array, count: jax.Array) -> jax.Array:
    """Return the sum over the leading axis, by a count: finite also where the sum is not."""
    few = few_of(x, axis=0)
    return jnp.sum(x * few, axis=0) / count / few


def few_of(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the factor by which x may be summed: 1, and less where x is near float32's limit."""
    # no constant: of one, XLA moves the product to behind the sum
    return jnp.where(jnp.max(jnp.abs(x), axis=axis, initial=0.0) > LARGE, FEW, 1.0)


def equally(aggregate: AggregateFn) -> AggregateFn:
    """Return the same aggregate of present peers that all have equal weights."""

    def of_equals(values: Tree, weight: jax.Array) -> Tree:
        return aggregate(values, weight > 0)

    return of_equals


EQUAL_MEAN = equally(mean)


def mean_on_host(values: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Return `mean` of some elements of each peer's values, on the host.

    In float32, one peer after the other: each element alone, so that it is the same whichever
    others are there. XLA takes another order, by shapes; so last bits may differ from `mean`.

    Args:
      values: Float32 arrays of one shape, by peer. What has the weight 0 is not read.
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
"""By an `AggregateFn`, the same of parts of the values on the host, where that can be."""
