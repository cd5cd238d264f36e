"""Settings of glibc's allocator that keep freed memory: a quarter more rounds per second on a CPU.

XLA allocates and frees the buffers of each step anew. By default glibc returns large ones to the
kernel, and the next step pays for a page fault every 4 kB. Kept in arenas of huge pages, the
same buffers are reused at once. This costs memory (benchmarks/RESULTS.md) and changes no bit of a
result; `GLIBC_TUNABLES=` in front of a command leaves the allocator alone.

Compiling a step takes hundreds of MB, in small blocks that leave gaps too short for a step's
buffers. So what is unused then returns to the kernel.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TUNABLES = {
    "hugetlb": 1,  # huge pages, if the kernel grants them on request
    # With one arena for all threads they wait for each other: a process that has compiled its step,
    # and so has long lists of free blocks, then takes 1.2 times as long for each step.
    "arena_max": 4,
    "mmap_max": 0,  # large blocks come from the pool too
    "trim_threshold": 2**32,  # unused bytes above which memory returns to the kernel
    "mxfast": 0,  # small free blocks join their neighbours at once, so large ones fit there again
}
GLIBC_SETTINGS = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"  # JAX's name of the event


def tune() -> None:
    """Restart this process, once, with TUNABLES of malloc, which glibc reads only at its start.

    Settings of the user (`GLIBC_TUNABLES`, also an empty one) stay.
    """
    if "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    os.environ["GLIBC_TUNABLES"] = GLIBC_SETTINGS
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trim_after_compiling() -> None:
    """Return the allocator's unused memory after each program that JAX compiles from now on.

    Only where `tune` has set the allocator.
    """
    if os.environ.get("GLIBC_TUNABLES") == GLIBC_SETTINGS:
        import jax

        jax.monitoring.register_event_duration_secs_listener(_trim)


@contextmanager
def keeping() -> Iterator[None]:
    """Keep freed memory within, in a process that was not started with TUNABLES.

    The same but for huge pages and arenas. Afterwards glibc has the thresholds that it gives
    itself once a block of 32 MB was freed. Settings of the user stay; does nothing without glibc.
    """
    import jax

    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc, left = ctypes.CDLL(None), any(n.startswith(("GLIBC_TUN", "MALLOC_")) for n in os.environ)
    if not left:
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    jax.monitoring.register_event_duration_secs_listener(_trim)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(_trim)
        if not left:
            libc.mallopt(M_MMAP_MAX, 2**16)
            libc.mallopt(M_MMAP_THRESHOLD, 2**25)
            libc.mallopt(M_TRIM_THRESHOLD, 2**26)
            libc.malloc_trim(0)


def _trim(event: str, seconds: float, **_: str | int) -> None:
    if event == COMPILED_EVENT:
        ctypes.CDLL(None).malloc_trim(0)
