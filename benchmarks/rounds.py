"""How long a round takes, part by part: `python -m benchmarks.rounds --layout each`.

Prints one JSON line: medians over rounds on random tokens, for the model, peers and optimizer of a
run file with `checkpoint.Init`. Every part waits for the devices, so parts add up to the round, and
the round is a little slower than in stage `train`. Compare lines only of one quiet machine.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path

from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--layout", choices=("each", "shard_map", "vmap"))
    parser.add_argument("--peers", type=int, help="instead of the run file's, as much work each")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    allocator.tune()
    run = runfile.load(chosen.run)
    devices.prepare(run)
    layout, peers = chosen.layout or run.peers.layout, chosen.peers or run.peers.count
    print(json.dumps(measure(with_peers(run, peers), layout, chosen.rounds)))


def measure(run: runfile.Run, layout: str, rounds: int) -> dict:
    """Takes rounds, and one before them that compiles."""
    import jax
    import numpy as np

    from benchmarks.trial import Trial

    trial = Trial(run, layout)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for part in (trial.step, trial.exchange, trial.apply):
            began = time.perf_counter()
            part()
            seconds[part.__name__].append(time.perf_counter() - began)
    first = sum(times.pop(0) for times in seconds.values())
    median = {part: float(np.median(times)) for part, times in seconds.items()}
    return {
        "benchmark": "rounds",
        "layout": layout,
        "optimizer": run.llm.optimizer.tag(),
        "peers": run.peers.count,
        "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(trial.params))),
        "tokens_per_peer": trial.tokens // run.peers.count,
        "device": jax.devices()[0].device_kind,
        "devices": len(trial.peers.groups),
        "threads": os.environ["NPROC"],
        "first_round_seconds": round(first, 2),
        "tokens_per_second": round(trial.tokens / sum(median.values())),
        **{f"{part}_milliseconds": round(1000 * s, 2) for part, s in median.items()},
        "bytes_up": len(trial.payloads[0]),
    }


def with_peers(run: runfile.Run, count: int) -> runfile.Run:
    """The run with other peers, each with as many sequences as the run file gives one."""
    each = -(-run.config.global_batch_size_end // run.peers.count)
    peers = run.peers.model_copy(update={"count": count})
    batch = run.config.model_copy(update={"global_batch_size_end": each * count})
    return run.model_copy(update={"peers": peers, "config": batch})


if __name__ == "__main__":
    main()
