"""The memory of this machine: what cannot fit is refused before any of it is allocated."""

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import jax

from lockstep.errors import LockstepError

CGROUP = Path("/sys/fs/cgroup")  # of this container, where it is in one
MEMORY_LIMITS = "memory.max", "memory/memory.limit_in_bytes"  # versions 2 and 1
RESIDENT_PAGES = Path("/proc/self/statm")


def check(tree: Any, what: str, memory_gb: float | None) -> None:
    """Check that arrays, or what has their shapes and dtypes, fit into this memory together.

    Errors call them `what`. `memory_gb` is the limit; None is the machine's memory.
    """
    leaves = jax.tree.leaves(tree)
    elements = sum(math.prod(leaf.shape) for leaf in leaves)
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    limit = total() if memory_gb is None else memory_gb * 1e9
    if needed > limit:
        source = "memory here" if memory_gb is None else "[runtime] memory_gb"
        raise LockstepError(
            f"{what}: {elements:,} numbers take {needed / 1e9:,.1f} GB, expected at most the "
            f"{limit / 1e9:,.1f} GB of {source}"
        )


def total() -> int:
    """Return the bytes of memory that this machine, or its container, has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = [(CGROUP / name).read_text() for name in MEMORY_LIMITS if (CGROUP / name).is_file()]
    return min([machine, *(int(limit) for limit in said if limit.strip() != "max")])


@cache
def room(devices: int = 1) -> int:
    """Return the bytes of this machine's memory, or those of so many devices if these have less."""
    stats = jax.local_devices()[0].memory_stats() or {}  # None of what has no memory of its own
    limit = stats.get("bytes_limit")
    return total() if limit is None else min(total(), devices * limit)


def resident() -> int | None:
    """Return the bytes of memory that this process has; None where the system does not tell."""
    if not RESIDENT_PAGES.is_file():
        return None
    return int(RESIDENT_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
