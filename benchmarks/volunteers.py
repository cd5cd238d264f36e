"""What a run over a store takes of who follows it: `python -m benchmarks.volunteers`.

The peers of a run file take a few rounds over a folder, each as `lockstep volunteer join` in a
process of its own, which fetches its data first; beside them `lockstep verify --follow`. Prints a
JSON line: seconds from a peer's start to the first link that lists its message, and the CPU seconds
that a peer and the follower take for a round, from the first link to the last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomlkit

from pipeline.toml_file import written_whole

TICK = os.sysconf("SC_CLK_TCK")
FOLLOWER = "follower"
Running = subprocess.Popen[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/diloco.toml"))
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="volunteers-") as folder:
        figures = measured(args.run, args.rounds, Path(folder))
    print(json.dumps({"benchmark": "volunteers", "run": args.run.name} | figures))


def measured(run_file: Path, rounds: int, folder: Path) -> dict[str, float]:
    """Return what a run of as many rounds took."""
    document = tomlkit.parse(written_whole(run_file)).unwrap()
    document["config"] |= {"total_steps": rounds, "witness_nodes": 0, "max_round_train_time": 600}
    document["links"]["clock"] = "store"
    document["held_out"]["every"] = rounds  # nobody measures in between
    peers = document["peers"]["count"]
    lab, store = folder / "lab", f"file://{folder / 'store'}"
    lab.mkdir()
    (lab / "run.toml").write_text(tomlkit.dumps(document))
    for stage in "download", "convert":
        output_of(stage, "--run", lab / "run.toml", "--root", lab)
    output_of("volunteer", "key", "--key", lab / "key.pem")
    options = ["--run", lab / "run.toml", "--root", lab, "--key", lab / "key.pem"]
    output_of("volunteer", "open", store, *options)
    for peer in range(peers):
        public = output_of("volunteer", "key", "--key", folder / f"{peer}.pem").split()[-1]
        output_of("volunteer", "admit", store, peer, public, "--key", lab / "key.pem")
    running: dict[str, Running] = {}
    began = time.monotonic()
    for peer in range(peers):
        command = ["volunteer", "join", store, "--root", folder / str(peer)]
        running[str(peer)] = started(folder, str(peer), *command, "--key", folder / f"{peer}.pem")
    command = ["verify", store, "--follow", "--root", folder / FOLLOWER]
    running[FOLLOWER] = started(folder, FOLLOWER, *command)
    try:
        return watched(running, folder, rounds, began)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def watched(
    running: dict[str, Running], folder: Path, rounds: int, began: float
) -> dict[str, float]:
    """Compare the processes' CPU seconds when the follower has merged the first round and the last
    but one: programs are compiled before, and the run's end is written after.
    """
    samples, first_link = [], 0.0
    for step in (1, rounds - 1):
        while not (folder / f"{FOLLOWER}.txt").read_text().count(f"\nround {step}:"):
            for name, process in running.items():
                if process.poll():
                    raise SystemExit((folder / f"{name}.txt").read_text()[-2000:])
            if not first_link and list((folder / "store/rounds/00000001").glob("*.closed")):
                first_link = time.monotonic() - began
            time.sleep(0.1)
        samples.append({name: cpu_seconds(process.pid) for name, process in running.items()})
    per_process = {name: (samples[1][name] - samples[0][name]) / (rounds - 2) for name in running}
    follower = per_process.pop(FOLLOWER)
    peer = statistics.median(per_process.values())
    return {
        "rounds": rounds,
        "first_link_seconds": round(first_link, 1),
        "peer_cpu_seconds": round(peer, 3),
        "follower_cpu_seconds": round(follower, 3),
        "follower_of_peer": round(follower / peer, 4),
    }


def started(folder: Path, name: str, *command: object) -> Running:
    """Start a command of `lockstep`, whose output goes to NAME.txt."""
    with open(folder / f"{name}.txt", "wb") as file:
        file.write(b"\n")
        file.flush()
        words = [sys.executable, "-m", "lockstep", *map(str, command)]
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)


def output_of(*command: object) -> str:
    """Run a command of `lockstep`, and return what it printed."""
    return subprocess.check_output(
        [sys.executable, "-m", "lockstep", *map(str, command)], text=True
    )


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process so far, without those of its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


if __name__ == "__main__":
    main()
