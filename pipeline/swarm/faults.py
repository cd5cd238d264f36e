"""What goes wrong in a run, on purpose: a fault is a wrapper around what a peer sends.

Neither the optimizer nor the peer knows: its own state goes on as if it had sent the truth. To add
a kind, add its name to `config.FaultKind` and one row to `CORRUPT`.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pipeline import config
from pipeline.optim.optimizer import Tree


def _sign_flip(message: Tree) -> Tree:
    """Every value with the other sign; sign bits and real values alike, places untouched."""

    def flip(leaf: np.ndarray) -> np.ndarray:
        if leaf.dtype == bool:
            return ~leaf
        return leaf if np.issubdtype(leaf.dtype, np.integer) else -leaf

    return jax.tree.map(flip, message)


CORRUPT: dict[str, Callable[[Tree], Tree]] = {"sign_flip": _sign_flip}


class Faults:
    """A run's schedule of faults, and how often each has fired.

    Args:
      schedule: `[faults] schedule`.
    """

    def __init__(self, schedule: Sequence[config.Fault]):
        self.schedule = schedule
        self.fired: Counter[str] = Counter()

    def corrupt(self, message: Tree, peer: int, step: int) -> Tree:
        """The message that `peer` sends at `step` in place of the true one."""
        for fault in self.schedule:
            first, last = fault.rounds
            if fault.peer == peer and first <= step <= last:
                message = CORRUPT[fault.kind](message)
                self.fired[fault.kind] += 1
        return message
