"""What sinks cost a training: `python -m benchmarks.sinks [data/trained]`, of a finished one.

Its rounds are told again to each sink and to all together, as fast as they are taken. One JSON line
each: `cpu_ms`, of the process for a round, sinks' threads included; `told_ms`, in which the trainer
itself waits. The import of their packages, and their start, are not in it.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.monitor.sinks import tracker
from pipeline.monitor.sinks.tracker import Tracker
from pipeline.runfile.run import Run
from pipeline.stage.keys import PROJECT, RUN_FILE

WARM_UP, SETTLE_SECONDS = 10, 0.5


def cost(run: Run, trained: Path, names: tuple[str, ...], aside: Path) -> dict:
    folder = aside / "data" / "runs" / "benchmark"
    (folder / "transcript").mkdir(parents=True)
    shutil.copy(trained / "transcript" / "header.json", folder / "transcript")
    (folder / "transcript" / "rounds.jsonl").touch()
    runtime = run.runtime.model_copy(update={"sinks": names})
    entries = Transcript(trained / "transcript").rounds
    with Tracker(run.model_copy(update={"runtime": runtime}), folder, 0) as sinks:

        def tell(rounds: slice) -> float:
            began = time.perf_counter()
            for entry in entries[rounds]:
                sinks.took(entry, 1.0, 1.0)
            told = time.perf_counter() - began
            while not all(feed._queue.empty() for feed in sinks._feeds):
                time.sleep(0.01)
            time.sleep(SETTLE_SECONDS)
            return told

        tell(slice(WARM_UP))
        cpu, told = time.process_time(), tell(slice(WARM_UP, None))
        cpu = time.process_time() - cpu
    rounds = len(entries) - WARM_UP
    figures = {"cpu_ms": 1000 * cpu / rounds, "told_ms": 1000 * told / rounds}
    return {"sinks": names, "rounds": rounds} | {k: round(v, 2) for k, v in figures.items()}


def main() -> None:
    trained = Path(sys.argv[1] if len(sys.argv) > 1 else "data/trained")
    run = runfile.load(PROJECT / RUN_FILE)
    every = tuple(tracker.SINKS)
    for names in (*((name,) for name in every), every):
        with tempfile.TemporaryDirectory() as aside:
            print(json.dumps(cost(run, trained, names, Path(aside))), flush=True)


if __name__ == "__main__":
    main()
