"""The bound on a round's values: a message with a larger value counts as none.

    |value| <= 2**20 * max(1, m)

with m the median, over the messages of the round, of their largest magnitudes (of an even number,
the lower of the middle two). So up to half of the peers may send what they like without moving the
bound, and no value up to 2**20 is ever beyond it. Magnitudes are compared, not L2 norms, because
those depend on the order of a sum. Messages beyond the bound are left out, and the rest are
compared again.
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
    """Return the largest magnitude of a message's values; 0 if it has only signs or codes."""
    sizes = [0.0]
    for leaf in jax.tree.leaves(message, is_leaf=_is_selection):
        values = _values(leaf)
        if values.size and values.dtype not in (bool, np.uint8):
            sizes.append(float(max(values.max(), -values.min())))
            drop_pages([values])
    return max(sizes)


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


def _is_selection(node: object) -> bool:
    return isinstance(node, Coefficients | SomeBlocks)


def _values(leaf: Any) -> np.ndarray:
    """Return the values of a parameter, without positions and flags of zero blocks."""
    if isinstance(leaf, SomeBlocks):
        leaf = leaf.sent
    return np.asarray(leaf.value_NK if isinstance(leaf, Coefficients) else leaf)
