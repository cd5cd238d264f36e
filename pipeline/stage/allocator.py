"""Settings of glibc's allocator that keep freed memory: a quarter more rounds per second on a CPU.

XLA allocates and frees the buffers of each step anew. By default glibc returns large ones to the
kernel, and the next step pays for a page fault every 4 kB. Kept in one arena of huge pages, the
same buffers are reused at once. This costs memory (benchmarks/RESULTS.md) and changes no bit of a
result; `GLIBC_TUNABLES=` in front of a command leaves the allocator alone.
"""

import os
import platform
import sys

TUNABLES = {
    "hugetlb": 1,  # huge pages, if the kernel grants them on request
    "arena_max": 1,  # one pool for all threads
    "mmap_max": 0,  # large blocks come from the pool too
    "trim_threshold": 2**32,  # unused bytes above which memory returns to the kernel
}


def tune() -> None:
    """Restart this process, once, with TUNABLES, which glibc reads only at its start.

    Settings of the user (`GLIBC_TUNABLES`, also an empty one) stay.
    """
    if "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    text = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
    os.environ["GLIBC_TUNABLES"] = text
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
