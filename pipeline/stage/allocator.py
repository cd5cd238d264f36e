"""The C library's allocator, told to keep what it has: a quarter more rounds a second on a CPU.

XLA allocates and frees the buffers of each step anew. By default glibc gives large ones back to
the kernel, and the next step pays for a page fault every 4 kB. Kept in one arena of huge pages, the
same buffers come back at once. It costs memory (benchmarks/RESULTS.md) and changes no bit of a
result; `GLIBC_TUNABLES=` in front of a command leaves the allocator as it is.
"""

import os
import platform
import sys

TUNABLES = {
    "hugetlb": 1,  # huge pages, where the kernel gives them to who asks
    "arena_max": 1,  # one pool for all threads
    "mmap_max": 0,  # large blocks too come from the pool
    "trim_threshold": 2**32,  # bytes that may lie unused before the kernel gets them back
}


def tune() -> None:
    """Starts this process over with TUNABLES, which glibc reads only then; once, and early.

    Settings that the user has made (`GLIBC_TUNABLES`, empty for none) stand.
    """
    if "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    text = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
    os.environ["GLIBC_TUNABLES"] = text
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
