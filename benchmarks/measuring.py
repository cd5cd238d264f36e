"""How benchmarks measure: in turns, in processes of their own, beside what a machine can do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.machine import cores

CORES = cores.count()
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Dense bfloat16, sums in float32, of one device by JAX's `device_kind`. NVIDIA's data sheets of
# H100 (SXM and PCIe), H200 and A100, which give twice the first three, with sparsity; that of H100
# SXM to the digit from the table of the H100 white paper. Read 2026-11-23.
PUBLISHED = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}


def in_turns(
    parts: Mapping[str, Callable[[], object]],
    repeats: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each part by its name, part after part: other work slows all of them alike.

    The first `warm` turns are not counted: they compile.
    """
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(repeats + warm):
        for name, part in parts.items():
            started = clock()
            part()
            if turn >= warm:
                seconds[name].append(clock() - started)
    return seconds


def alone(module: str, options: Mapping[str, object], *flags: str, **environment: str) -> dict:
    """The last line that a module of this folder prints, run in a process of its own."""
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", f"benchmarks.{module}", *words, *flags]
    output = subprocess.check_output(command, text=True, env=os.environ | environment)
    return json.loads(output.splitlines()[-1])


# ---- FLOP per second ----


def published_flops() -> float | None:
    """bfloat16 FLOP per second of all devices by their data sheet; None if it is not known."""
    import jax

    devices = jax.devices()
    per_device = PUBLISHED.get(devices[0].device_kind)
    return per_device and per_device * len(devices)


def matrix_flops(precision: str) -> float:
    """FLOP per second of one large product of this dtype on each device, all at once."""
    import jax
    import jax.numpy as jnp

    n = 1024 if jax.default_backend() == "cpu" else 8192
    product = jax.jit(lambda a, b: a @ b)
    operands = [
        jax.device_put((jnp.ones((n, n), precision), jnp.ones((n, n), precision)), device)
        for device in jax.devices()
    ]
    times = 8
    jax.block_until_ready([product(*pair) for pair in operands])
    started = time.perf_counter()
    jax.block_until_ready([product(*pair) for _ in range(times) for pair in operands])
    return 2 * n**3 * times * len(operands) / (time.perf_counter() - started)


# ---- Memory ----


def peak(call: Callable[[], object]) -> int:
    """Calls, and returns the bytes of memory that were resident at the most, less those before.

    Files that are mapped into memory count as soon as they are read there, as all else does.
    """
    RESET.write_text("5")  # the peak so far is forgotten
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(key: str) -> int:
    """Returns what the system says of this process's memory: VmRSS now, VmHWM at its peak."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
