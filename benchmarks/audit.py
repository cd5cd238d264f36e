"""What an audit costs beside the training that it audits: `python -m benchmarks.audit`.

Trains the model of a run file for some rounds on made data, audits the transcript without replay,
with a quarter and with all of its windows, in turns, and prints one JSON line: medians, as shares
of the training's own time; what the transcript takes on the disk.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices

AUDITS = 5  # without replay, of each transcript: they are quick


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--windows", type=int, default=4, help="of each peer")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    allocator.tune()
    run = runfile.load(chosen.run)
    devices.prepare(run)
    every = chosen.rounds // chosen.windows
    settings = run.config.model_copy(update={"total_steps": chosen.rounds})
    witness = run.witness.model_copy(update={"snapshot_every": every})
    run = run.model_copy(update={"config": settings, "witness": witness})
    print(json.dumps(measure(run, chosen.windows, chosen.repeats)))


def measure(run: runfile.Run, windows: int, repeats: int) -> dict:
    """Trains and audits in turns, after a first time that compiles."""
    import numpy as np

    from benchmarks.simulated import Lab
    from lockstep.transcript.transcript import Transcript

    lab = Lab(run, run.llm.checkpoint.config)
    pairs = [(window, peer) for window in range(windows) for peer in range(run.peers.count)]
    quarter = set(random.Random(0).sample(pairs, len(pairs) // 4))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work) -> object:
        started = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            transcript = timed("train", lambda: lab.train(run, Path(folder))).transcript  # noqa: B023
            samples = [("no_replay", set())] * AUDITS + [("quarter", quarter), ("all", set(pairs))]
            for name, sample in samples:
                fresh = Transcript(transcript.folder)  # nothing of it is decoded yet
                findings = timed(name, lambda: lab.audit(run, fresh, sample=sample))  # noqa: B023
                assert not findings, findings
            sizes = {
                name: sum(p.stat().st_size for p in (Path(folder) / name).rglob("*") if p.is_file())
                for name in ("payloads", "snapshots")
            }
            lines = (Path(folder) / "rounds.jsonl").stat().st_size
    rounds = run.config.total_steps
    compiled = {name: len(times) // (repeats + 1) for name, times in seconds.items()}
    median = {name: float(np.median(t[compiled[name] :])) for name, t in seconds.items()}
    train, no_replay = median["train"], median["no_replay"]
    return {
        "benchmark": "audit",
        "rounds": rounds,
        "tokens_per_peer": run.config.global_batch_size_end
        // run.peers.count
        * run.llm.max_seq_len,
        "train_seconds": round(train, 2),
        "audit_without_replay": round(no_replay / train, 4),
        "replay_of_a_quarter": round((median["quarter"] - no_replay) / train, 4),
        "replay_of_all": round((median["all"] - no_replay) / train, 4),
        "transcript_line_bytes_per_round": round(lines / rounds),
        "payload_bytes_per_round": round(sizes["payloads"] / rounds),
        "snapshot_bytes": sizes["snapshots"],
    }


if __name__ == "__main__":
    main()
