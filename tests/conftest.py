"""All tests see four CPU devices and one thread-pool size, set before JAX is imported."""

import ctypes
import gc
import os
import signal
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

# A script's background job ignores Ctrl-C, and so would all that tests start: what is handled here
# is default there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of processes read the same source, which some containers have each compile anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "4"
os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# Tests compile the same small programs over and over; what they compare are the bits of results.
PROJECT = Path(__file__).resolve().parent.parent
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROJECT / ".pytest_cache" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


# Programs run for milliseconds and take seconds to compile: half of that in LLVM's optimizations,
# two thirds of the rest in the emitters of fused loops, which have a plain counterpart until 0.10.
# Cores are busy, so that nothing is won by compiling a program's parts at the same time.
QUICK = "--xla_cpu_parallel_codegen_split_count=1"
QUICK += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"


# A test may kill a process; none cuts the power, and a disk takes milliseconds for each file.
os.fsync = lambda descriptor: None

# What JAX traces are millions of small objects, few of them in cycles: collect those seldom.
gc.set_threshold(20_000)


def pytest_configure(config):
    """Compile quickly, but under `-m release` as users do."""
    if config.option.markexpr != "release":
        os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {QUICK}".strip()
    from pipeline.stage import compiled, keys

    assert compiled.check_programs()  # as stages in processes of their own do, from the first on

    # Every stage of every tiny run digests the source; no test edits this checkout's.
    digest = keys.digest_of_source
    known = cache(digest)
    keys.digest_of_source = lambda path: (known if PROJECT in path.parents else digest)(path)


@pytest.fixture(autouse=True)
def secrets_of_the_test_alone(monkeypatch):
    """What one test keeps secret is not hidden in the messages of the next."""
    from lockstep import errors

    monkeypatch.setattr(errors, "_secrets", set(errors._secrets))


MOST_RESIDENT = 2 * 2**30  # of a worker; one that keeps every program it compiled reaches 8 GiB


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_that_are_let_go():
    """Several workers fit into a machine: what they compile again comes from the disk."""
    yield
    import jax

    from lockstep.machine import memory

    if (memory.resident() or 0) > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


# Whole runs, and peers in processes, which wait for each other.
LONG = (Path(__file__).parent, Path(__file__).parent / "parts" / "carrier")


def pytest_collection_modifyitems(items):
    """The long tests come first: one that begins last leaves the other workers without work."""
    items.sort(key=lambda item: item.path.parent not in LONG)
