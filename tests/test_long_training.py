"""A training of many rounds takes no more memory, files and threads than one of a few."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pipeline.stage.keys import RUN_FILE
from tests import tiny

ROUNDS, SETTLED = 20_000, 2_000
BYTES = 5_000  # of memory for each round beyond those, at the most; a record takes 3,000 on disk


class Taken(NamedTuple):
    """What a training's process has after a round."""

    round: int
    memory: int
    files: int
    threads: int


def taken(process: int, root: Path) -> Taken | None:
    """Ask the system; None before the first round and at the end."""
    try:
        (status,) = (root / "data" / "runs").glob("*/status.json")
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        files, tasks = (os.listdir(f"/proc/{process}/{name}") for name in ("fd", "task"))
        step = json.loads(status.read_text())["round"]
    except (OSError, ValueError):
        return None
    return Taken(step, pages * os.sysconf("SC_PAGE_SIZE"), len(files), len(tasks))


def watch(process: subprocess.Popen, root: Path) -> list[Taken]:
    """Ask each second, until the process ends."""
    seen = []
    while process.poll() is None:
        seen.append(taken(process.pid, root))
        time.sleep(1)
    return [found for found in seen if found]


@pytest.mark.soak
def test_twenty_thousand_rounds_and_eight_hundred_checkpoints_leave_nothing_behind(tmp_path):
    data, run_file = tiny.write_data(tmp_path / "tokens"), tmp_path / Path(RUN_FILE).name
    tokens = np.random.default_rng(0).integers(tiny.VOCABULARY, size=ROUNDS * 2 * 16)
    (data / "a.ds").write_bytes(tokens.astype("<u2").tobytes())
    often = {"witness__snapshot_every": ROUNDS, "held_out__every": ROUNDS}
    sizes = {"config__global_batch_size_start": 2, "config__global_batch_size_end": 2}
    changes = {"config__total_steps": ROUNDS, "runtime__checkpoint_every": 25, **often, **sizes}
    tiny.write_run(run_file, tiny.run_document(data, peers__micro_batch=1, **changes))
    tiny.by_hand(run_file, tmp_path, "download", "convert")
    process = tiny.lockstep("train", run_file, tmp_path)
    with ThreadPoolExecutor() as pool:
        watched = pool.submit(watch, process, tmp_path)
        said = process.communicate()[0]
    assert process.returncode == 0, said
    seen = [found for found in watched.result() if found.round >= SETTLED]
    settled, last = (Taken(*np.median(np.array(some), axis=0)) for some in (seen[:20], seen[-20:]))
    print(f"{settled} -> {last}")  # a checkpoint in progress has files and threads for a moment
    assert last.memory - settled.memory < BYTES * (last.round - settled.round)
    assert last.files - settled.files < 20
    assert last.threads - settled.threads < 20
