"""The loss of a large vocabulary, whole and in parts: `python -m benchmarks.loss`.

Prints one JSON line: seconds of the loss and its gradients, on every device at once as peers run,
from one process, medians of interleaved repeats; and the memory that each is compiled to take
beside its arguments, at 8,192 tokens.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable

from benchmarks import sizes
from lockstep.machine import allocator
from pipeline.stage import devices

TOKENS = 8192  # of the figures of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of each device, for seconds")
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    allocator.tune()
    devices.prepare(sizes.load(sizes.document(sizes.SIZES["2M"])))
    print(json.dumps(measure(chosen)), flush=True)


def measure(chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from lockstep.programs import loss

    def drawn(tokens: int) -> tuple:
        rng = np.random.default_rng(0)
        x_ND = rng.normal(size=(tokens, chosen.width)).astype(np.float32)
        kernel_DV = 0.02 * rng.normal(size=(chosen.width, chosen.vocabulary)).astype(np.float32)
        tokens_BT = rng.integers(chosen.vocabulary, size=(1, tokens), dtype=np.int32)
        return x_ND, kernel_DV, tokens_BT, np.ones(1, np.float32)

    def program(largest: int) -> Callable:
        def gradients(*arguments: jax.Array) -> tuple:
            loss.LARGEST = largest  # read while it is traced
            return jax.value_and_grad(loss.weighted_cross_entropy, argnums=(0, 1))(*arguments)

        return jax.jit(gradients)

    programs = {"whole": program(2**62), "in parts": program(loss.LARGEST)}
    memory = {}
    for name, gradients in programs.items():
        found = gradients.lower(*drawn(TOKENS)).compile().memory_analysis()
        memory[name] = found.temp_size_in_bytes + found.output_size_in_bytes
    arguments = [jax.device_put(drawn(chosen.tokens), device) for device in jax.devices()]
    seconds = defaultdict(list)
    for repeat in range(chosen.repeats + 1):  # the first compiles
        for name, gradients in programs.items():
            began = time.perf_counter()
            jax.block_until_ready([gradients(*own) for own in arguments])
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    median = {name: float(np.median(times)) for name, times in seconds.items()}
    return {
        "benchmark": "loss",
        "vocabulary": chosen.vocabulary,
        "width": chosen.width,
        "tokens_per_device": chosen.tokens,
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "seconds": {name: round(value, 3) for name, value in median.items()},
        "seconds_ratio": round(median["in parts"] / median["whole"], 3),
        "memory_bytes_at_8192_tokens": memory,
        "memory_ratio": round(memory["whole"] / memory["in parts"], 1),
    }


if __name__ == "__main__":
    main()
