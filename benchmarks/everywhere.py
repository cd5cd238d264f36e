"""What it costs that a step has the same bits everywhere: `python -m benchmarks.everywhere`.

Prints a JSON line: milliseconds of one peer's step of DisTrO (of a CPU's time; on a GPU, until the
result is there), as compiled and by rules with products in 20 and in 8 bits, medians of interleaved
repeats in one process on one device; and the CPU seconds that each takes to compile.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from statistics import median

from benchmarks import sizes
from benchmarks.measuring import in_turns
from lockstep.machine import allocator
from pipeline.stage import devices

AS_COMPILED = "as compiled"  # what others are compared with
KINDS = {
    AS_COMPILED: {},
    "20 bits": {"bits": "everywhere"},
    "8 bits": {"bits": "everywhere", "product_bits": 8},
}
BOUNDS = {"ratio": {"8 bits": 1.5}, "compile_ratio": {"8 bits": 2}}  # of two idle cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sizes.SIZES, help="by default the default run's model")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    allocator.tune()
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    devices.prepare(run_of(chosen.size, KINDS[AS_COMPILED]))
    print(json.dumps(measure(chosen.size, chosen.repeats) | {"bounds": BOUNDS}), flush=True)


def run_of(size: str | None, settings: dict):
    """A run with these settings in `[peers]`."""
    document = sizes.document(sizes.SIZES[size]) if size else sizes.default()
    document["peers"] |= settings
    return sizes.load(document)


def measure(size: str | None, repeats: int, kinds: Mapping[str, dict] = KINDS) -> dict:
    """Steps of each kind, by its settings; `ratio` is to AS_COMPILED, if that is among them."""
    import jax

    steps, compiling = {}, {}
    for kind, settings in kinds.items():
        lowered, arguments = lower(run_of(size, settings))
        started = time.process_time()
        program = lowered.compile()
        compiling[kind] = time.process_time() - started
        steps[kind] = lambda program=program, args=arguments: jax.block_until_ready(program(*args))
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    seconds = in_turns(steps, repeats, warm=2, clock=clock)
    middle = {kind: 1e3 * median(times) for kind, times in seconds.items()}
    whole, once = middle.get(AS_COMPILED), compiling.get(AS_COMPILED)
    return {
        "benchmark": "everywhere",
        "size": size or "default",
        "ms": {kind: round(ms, 1) for kind, ms in middle.items()},
        "ratio": {kind: whole and round(ms / whole, 2) for kind, ms in middle.items()},
        "compile_cpu_s": {kind: round(s, 1) for kind, s in compiling.items()},
        "compile_ratio": {kind: once and round(s / once, 2) for kind, s in compiling.items()},
        "device": jax.devices()[0].device_kind,
    }


def lower(run) -> tuple:
    """The lowered program of a peer's step, which keeps its state, and its arguments."""
    import jax
    import numpy as np

    from benchmarks.trial import Trial

    trial = Trial(run)
    programs, work = trial.programs, trial.work[0]
    own, shared = programs.init(trial.params)
    arguments = trial.params, own, shared, work.rows_MB, np.int32(work.count), np.int32(1)
    return jax.jit(programs.step_of_a_peer).lower(*arguments), jax.device_put(arguments)


if __name__ == "__main__":
    main()
