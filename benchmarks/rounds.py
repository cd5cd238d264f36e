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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import allocator, config, devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--layout", choices=("each", "shard_map", "vmap"))
    parser.add_argument("--peers", type=int, help="instead of the run file's, as much work each")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    allocator.tune()
    run = config.load(chosen.run)
    devices.prepare(run)
    layout = chosen.layout or run.peers.layout
    print(json.dumps(measure(run, layout, chosen.peers or run.peers.count, chosen.rounds)))


def measure(run: config.Run, layout: str, count: int, rounds: int) -> dict:
    """Takes rounds of `count` peers, each with the sequences that the run file gives a peer."""
    import jax
    import numpy as np

    from pipeline.swarm import wire
    from pipeline.swarm.peers import Peers, Work, capacity
    from pipeline.swarm.state import State
    from pipeline.train_step import Programs, micro_batches

    hf_config = run.llm.checkpoint.config
    programs = Programs(run, hf_config)
    model_config = programs.model.Config.from_hf(hf_config)
    params = jax.device_get(programs.model.init(model_config, seed=0))
    own, shared = jax.device_get(programs.init(params))
    form = wire.form_of(programs.optimizer, params, run.peers.wire)
    peers = Peers(programs, layout, State(params, shared, (own,) * count), jax.devices())

    each, length = capacity(run), run.llm.max_seq_len
    tokens_NT = np.random.default_rng(0).integers(hf_config["vocab_size"], size=(each, length))
    tokens_MBT = micro_batches(tokens_NT.astype(np.int32), each, run.peers.micro_batch)
    work = {peer: Work(tokens_MBT, each) for peer in range(count)}

    seconds: dict[str, list[float]] = defaultdict(list)
    for step in range(1, rounds + 2):
        with _timed(seconds, "step"):
            done = peers.step(work, step)
        with _timed(seconds, "wire"):
            payloads = {peer: wire.encode(d.message, form) for peer, d in done.items()}
            received = {peer: wire.decode(data, form) for peer, data in payloads.items()}
        with _timed(seconds, "receive"):
            peers.receive(received, form.like, step)
            jax.block_until_ready(list(peers.params_on.values()))
    first = sum(times.pop(0) for times in seconds.values())
    median = {part: float(np.median(times)) for part, times in seconds.items()}
    return {
        "benchmark": "rounds",
        "layout": layout,
        "optimizer": run.llm.optimizer.tag(),
        "peers": count,
        "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(params))),
        "tokens_per_peer": each * length,
        "device": jax.devices()[0].device_kind,
        "devices": len(peers.devices),
        "threads": os.environ["NPROC"],
        "first_round_seconds": round(first, 2),  # it compiles
        "tokens_per_second": round(count * each * length / sum(median.values())),
        **{f"{part}_milliseconds": round(1000 * s, 2) for part, s in median.items()},
        "bytes_up": len(payloads[0]),
    }


@contextmanager
def _timed(seconds: dict[str, list[float]], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part].append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
