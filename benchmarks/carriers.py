"""Stage train by where its peers run: `python -m benchmarks.carriers`.

Prints one JSON line per carrier: tokens per second after the first round, and the most memory that
the trainer and its peers' processes held together, as proportional set size. It takes the first
rounds of the default run, with each carrier in turn; medians.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

import tomlkit

SPEED = re.compile(r"tokens per second ([0-9,]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--carrier", nargs="+", default=["in_process", "processes"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.toml" for name in chosen.carrier}
        for name, file in files.items():
            document = tomlkit.parse(chosen.run.read_text())
            document["config"]["total_steps"] = chosen.rounds
            document["runtime"]["carrier"] = name
            file.write_text(tomlkit.dumps(document))
        root = Path(folder) / "root"
        for stage in ("download", "convert"):
            run(stage, next(iter(files.values())), root)
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in files}
        for _ in range(chosen.repeats + 1):  # the first compiles
            for name, file in files.items():
                measured[name].append(train(file, root))
        for name, pairs in measured.items():
            speeds, sizes = zip(*pairs[1:], strict=True)
            line = {"benchmark": "carriers", "carrier": name, "rounds": chosen.rounds}
            line |= {"tokens_per_second": round(median(speeds)), "peak_mb": round(median(sizes))}
            print(json.dumps(line))


def run(stage: str, file: Path, root: Path) -> None:
    command = [sys.executable, "-m", "pipeline", stage, "--run", str(file), "--root", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def train(file: Path, root: Path) -> tuple[float, float]:
    """Train anew; tokens per second, and peak memory in MB."""
    for path in (root / "data/trained").glob("made-*.json"):
        path.unlink()
    command = [sys.executable, "-m", "pipeline", "train", "--run", str(file), "--root", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    sizes, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            sizes.append(sum(map(proportional_set_size, tree_of(process.pid))))

    thread = threading.Thread(target=watch)
    thread.start()
    output, _ = process.communicate()
    done.set()
    thread.join()
    if process.returncode:
        sys.exit(output)
    return float(SPEED.findall(output)[-1].replace(",", "")), max(sizes)


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(other for child in children for other in tree_of(int(child)))]


def proportional_set_size(pid: int) -> float:
    """Memory of a process in MB, pages that it shares in shares."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return int(re.search(r"^Pss: +(\d+) kB", text, re.M)[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
