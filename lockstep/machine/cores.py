"""The cores of this machine that this process may use."""

import os


def count() -> int:
    """Return how many cores this process may use: a cluster's job is given some of a machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
