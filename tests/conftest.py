"""All tests see four CPU devices and one thread-pool size, set before JAX is imported."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "4"
os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# Programs run for milliseconds and take seconds to compile, half of them in LLVM's optimizations.
# Tests marked `release` compile as users do.
QUICK = "JAX_DISABLE_MOST_OPTIMIZATIONS"
os.environ[QUICK] = "1"

# Tests compile the same small programs over and over; what they compare are the bits of results.
COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


def pytest_collection_modifyitems(items):
    """Whole runs come first: one that begins last leaves the other worker without work."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test marked `release`, its fixtures and its processes compile with all optimizations."""
    if not item.get_closest_marker("release"):
        return (yield)
    import jax

    os.environ[QUICK] = "0"
    jax.config.update(QUICK.lower(), False)
    try:
        return (yield)
    finally:
        os.environ[QUICK] = "1"
        jax.config.update(QUICK.lower(), True)
