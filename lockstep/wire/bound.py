"""The bound on a round's values: a message with a larger value counts as none.

    |value| <= 2**20 * max(1, m)

with m the median, over the messages of the round, of their largest magnitudes (of an even number,
the lower of the middle two). So up to half of the peers may send what they like without moving the
bound, and no value up to 2**20 is ever beyond it. Magnitudes are compared, not L2 norms, because
those depend on the order of a sum. Messages beyond the bound are left out, and the rest are
compared again.
"""

from collections.abc import Mapping
from functools import reduce
from statistics import median_low

import jax
import jax.numpy as jnp

from lockstep.optim.compressed.compressor import SomeBlocks, coefficients_of
from lockstep.optim.optimizer import Tree
from lockstep.wire.leaves import leaves_of
from lockstep.wire.leaves.leaf import Leaf

TIMES = 2.0**20


def largest(message: Tree) -> float:
    """Return the largest magnitude of a message's values, to be bounded; 0 of signs or codes."""
    return max([0.0, *(leaf.largest for leaf in _values(message))])


def largest_in_program(message: Tree) -> jax.Array:
    """Return `largest` as a program computes it, float32 []: exact, and infinite or NaN if any is.

    No largest magnitude of finite values is either.
    """
    raw = [leaf.raw for leaf in _values(message) if leaf.sized and leaf.raw.size]
    of_each = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in raw]
    return reduce(jnp.maximum, of_each, jnp.zeros((), jnp.float32))


def _values(message: Tree) -> list[Leaf]:
    return leaves_of(
        jax.tree.map(coefficients_of, message, is_leaf=lambda x: isinstance(x, SomeBlocks))
    )


def beyond(sizes: Mapping[int, float]) -> dict[int, str]:
    """Return the peers whose messages are beyond the bound, each with the reason.

    `sizes` is `largest` of each message of a round, by peer.
    """
    remaining, reasons = dict(sizes), dict[int, str]()
    while remaining:
        bound = TIMES * max(1.0, median_low(remaining.values()))
        over = {peer: size for peer, size in remaining.items() if size > bound}
        if not over:
            break
        for peer, size in over.items():
            reasons[peer] = f"a value of {size:.3g}, expected at most {bound:.3g} by the others'"
            del remaining[peer]
    return reasons
