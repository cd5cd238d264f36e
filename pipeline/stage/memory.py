"""The memory of this machine: what cannot fit is refused before any of it is allocated."""

import math
import os
from pathlib import Path
from typing import Any

import jax

from pipeline.errors import LockstepError

LIMIT = Path("/sys/fs/cgroup/memory.max")  # of this container, where it is in one


def check(tree: Any, what: str) -> None:
    """Check that arrays can be in memory together.

    Args:
      tree: Arrays, or their shapes and dtypes.
      what: What errors call them.

    Raises:
      LockstepError: They are larger than the machine's memory.
    """
    leaves = jax.tree.leaves(tree)
    elements = sum(math.prod(leaf.shape) for leaf in leaves)
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    if needed > (present := total()):
        raise LockstepError(
            f"{what}: {elements:,} numbers take {needed / 1e9:,.1f} GB, expected at most the "
            f"{present / 1e9:,.1f} GB of memory here"
        )


def total() -> int:
    """Return the bytes of memory that this machine, or its container, has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = LIMIT.read_text().strip() if LIMIT.is_file() else "max"
    return machine if limit == "max" else min(machine, int(limit))
