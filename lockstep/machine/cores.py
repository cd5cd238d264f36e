"""The cores of this machine that this process may use."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of this container, where it is in one
CPU_QUOTAS = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")  # versions 2 and 1


def count() -> int:
    """Return how many cores this process may use: a job or a container has some of a machine's."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for files in ([CGROUP / name for name in names] for names in CPU_QUOTAS):
        if all(map(Path.is_file, files)):
            quota, period = " ".join(map(Path.read_text, files)).split()
            if quota not in ("max", "-1"):
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores
