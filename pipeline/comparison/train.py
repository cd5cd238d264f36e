"""One training of a comparison: the stages download, convert and train in a folder of its own.

    data/compare/inputs/KEY/     shards and params that trainings of one seed share
    data/compare/runs/KEY/       a training in progress, which goes on after a kill
    data/compare/done/KEY.json   what came of it, by the key of its stage train

So a training that another comparison has done already is not done again.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.comparison.plan_file import FOLDER
from pipeline.comparison.trainings import digest, text
from pipeline.errors import LockstepError
from pipeline.stage.artifacts import read_json, write_json, write_text
from pipeline.stage.keys import OUT, PROJECT, Keys
from pipeline.stage.lock import hold

INPUTS = ("download", "convert")
DIVERGED = "diverged"  # in what stage train says then
PATIENCE = 3600.0  # seconds that a training waits for another that makes the same inputs
KEPT = (  # of train.json
    "rounds",
    "tokens",
    "parameters",
    "bytes_up",
    "bytes_down",
    "simulated_seconds",
    "held_out_stderr",
    "held_out_rows",
)


def key_of(tables: dict[str, Any], project: Path) -> str:
    """Return the key of a training's stage train."""
    run_file = _run_file(text(tables), project)
    try:
        return Keys(run_file).key("train")
    finally:
        run_file.unlink()


def _run_file(content: str, project: Path) -> Path:
    path = project / FOLDER / "runs" / f"{digest(content)}-{os.getpid()}.toml"
    write_text(path, content)
    return path


def trained(tables: dict[str, Any], project: Path) -> dict[str, Any]:
    """Return what came of a training; train it, unless that is kept.

    Raises:
      LockstepError: A stage failed, but for a training that diverged, which is a result.
    """
    run_file = _run_file(text(tables), project)
    try:
        return _trained(run_file, project)
    finally:
        run_file.unlink()


def _trained(run_file: Path, project: Path) -> dict[str, Any]:
    folder, keys = project / FOLDER, Keys(run_file)
    key = keys.key("train")
    done = folder / "done" / f"{key}.json"
    if not done.is_file():
        inputs = folder / "inputs" / f"{keys.key('download')}-{keys.key('convert')}"
        with hold(inputs.with_name(f"{inputs.name}.lock"), PATIENCE):
            for stage in INPUTS:
                _run(stage, run_file, inputs, project)
        root = folder / "runs" / key
        for stage in INPUTS:
            link = root / OUT[stage]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to((inputs / OUT[stage]).absolute())
        write_json(done, {"key": key, **_train(run_file, root, project)})
        shutil.rmtree(root)
    return read_json(done)


def _train(run_file: Path, root: Path, project: Path) -> dict[str, Any]:
    """Train, and return what came of it; losses are None where it diverged."""
    goes_on = (root / "data" / "runs").is_dir()
    began = time.perf_counter()
    try:
        peak = _run("train", run_file, root, project)
    except LockstepError as error:
        if DIVERGED not in str(error):
            raise
        return {"loss": None, "why": str(error)}
    seconds = time.perf_counter() - began
    metrics = read_json(root / "metrics/train.json")
    header, *lines = (root / "metrics/held_out.tsv").read_text(encoding="utf-8").splitlines()
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    snapshots = root / OUT["train"] / "transcript" / "snapshots"
    last = max(snapshots.iterdir(), key=lambda path: int(path.name))
    return {
        "loss": metrics["held_out_loss"],
        **{name: metrics[name] for name in KEPT},
        "params": read_json(last / "state.json")["params"],
        "peak_bytes": peak,
        "tokens_per_second": None if goes_on else metrics["tokens"] / seconds,
        "curve": [
            {
                "tokens": int(row["tokens"]),
                "bytes_up": int(row["bytes_up"]),
                "seconds": float(row["seconds"]),
                "loss": float(row["held_out_loss"]),
            }
            for row in rows
        ],
    }


def _run(stage: str, run_file: Path, root: Path, project: Path) -> int:
    """Run a stage, and return the most memory that it took.

    Raises:
      LockstepError: It failed; the message is its last line.
    """
    compiled = (project / FOLDER / "compiled").absolute()
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    environment.pop("DVC_ROOT", None)  # work in progress is beside the training
    command = [sys.executable, "-m", __package__.rpartition(".")[0], stage]
    command += ["--run", str(run_file.absolute()), "--root", str(root.absolute())]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{stage}.log", "wb") as log:
        process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=log, stderr=log)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code:
        said = (root / f"{stage}.log").read_text(encoding="utf-8", errors="replace").strip()
        raise LockstepError(said.rpartition("\n")[2] or f"{stage}: ended with {code}")
    return used.ru_maxrss * 1024
