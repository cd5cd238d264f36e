"""What a pack of parameters costs, to write and to read, at both ends: `-m benchmarks.packs`.

Prints one JSON line: medians in milliseconds, all in turns: our end (`parts/workload/pack.py`),
the worker's (`lockstep_worker/packs.py`, from and into the arrays of a model), and SHA-256 of the
values alone, which both ends compute.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from parts.workload import pack
from parts.workload.process.worker_process import PYTHON


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.parameters, chosen.repeats)))


def measure(parameters: int, repeats: int) -> dict:
    """Packs of so many parameters, in two tensors."""
    sys.path[:0] = map(str, PYTHON)  # the worker's side, which has no place in our environment
    from lockstep_worker import packs

    values = np.random.default_rng(0).standard_normal(parameters, np.float32)
    model = {"first": values[: parameters // 2].copy(), "second": values[parameters // 2 :].copy()}
    layout = packs.layout_of(model, None)
    hashes = {"layout_hash": packs.layout_hash(layout.tensors), "schema_hash": "of a model"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pack"
        kinds = {
            "write": lambda: pack.write_pack(folder, values, **hashes),
            "read": lambda: pack.read_pack(folder, count=parameters, **hashes),
            "worker_write": lambda: packs.write(folder, layout, hashes["schema_hash"], None),
            "worker_read": lambda: packs.load(folder, layout, hashes["schema_hash"]),
            "sha256": lambda: hashlib.sha256(values).hexdigest(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, take in kinds.items():
                if name.endswith("write"):
                    shutil.rmtree(folder, ignore_errors=True)
                began = time.perf_counter()
                take()
                seconds[name].append(time.perf_counter() - began)
    middle = {f"{name}_milliseconds": round(1000 * median(s), 1) for name, s in seconds.items()}
    return {"benchmark": "packs", "parameters": parameters, "repeats": repeats, **middle}


if __name__ == "__main__":
    main()
