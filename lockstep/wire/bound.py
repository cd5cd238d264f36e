"""The bound of a round's values: who sends one beyond it has sent no message.

    |value| <= 2**20 * max(1, m)

with m the median, over the messages of the round, of their largest magnitudes; of an even number,
the lower of the middle two. So up to half of the peers may send whatever they like, and no value up
to 2**20 is ever beyond the bound, whatever others send. Magnitudes are compared and not L2 norms,
which depend on the order of a sum. Who is beyond is left out, and the others are compared again.
"""

from collections.abc import Mapping
from statistics import median_low
from typing import Any

import jax
import numpy as np

from lockstep.optim.compressed.compressor import Coefficients, SomeBlocks
from lockstep.optim.optimizer import Tree
from lockstep.wire.spool import drop_pages

TIMES = 2.0**20


def largest(message: Tree) -> float:
    """Return the largest magnitude of a message's values; 0 where all of it are signs or codes."""
    found = [0.0]
    for leaf in jax.tree.leaves(message, is_leaf=_is_selection):
        values = _values(leaf)
        if values.size and values.dtype not in (bool, np.uint8):
            found.append(float(max(values.max(), -values.min())))
            drop_pages([values])
    return max(found)


def beyond(sizes: Mapping[int, float]) -> dict[int, str]:
    """Return the peers that are beyond the bound, and what is wrong with each one's message.

    Args:
      sizes: `largest` of each message of a round, by peer.
    """
    left, found = dict(sizes), dict[int, str]()
    while left:
        bound = TIMES * max(1.0, median_low(left.values()))
        over = {peer: size for peer, size in left.items() if size > bound}
        if not over:
            break
        for peer, size in over.items():
            found[peer] = f"a value of {size:.3g}, expected at most {bound:.3g} by the others'"
            del left[peer]
    return found


def _is_selection(node: object) -> bool:
    return isinstance(node, Coefficients | SomeBlocks)


def _values(leaf: Any) -> np.ndarray:
    """Values of a parameter: neither positions, nor which blocks are zero."""
    if isinstance(leaf, SomeBlocks):
        leaf = leaf.sent
    return np.asarray(leaf.value_NK if isinstance(leaf, Coefficients) else leaf)
