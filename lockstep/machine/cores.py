"""The cores of this machine that this process may use."""

import os


def count() -> int:
    """Return how many there are: a job of a cluster is given some of a machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
