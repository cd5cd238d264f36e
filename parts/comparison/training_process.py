"""One training of a comparison: the stages download, convert and train in a folder of its own.

    data/compare/inputs/KEY/     shards and params that trainings of one seed share
    data/compare/runs/KEY/       a training in progress, which goes on after a kill
    data/compare/locks/KEY       held while it runs, since another comparison may share it
    data/compare/done/KEY.json   what came of it, by the key of its stage train

So a training that another comparison has done already is not done again.
"""

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pipeline
from lockstep.errors import DivergedError, LockstepError
from lockstep.files import read_json, write_text
from lockstep.transcript.transcript import Transcript
from parts.comparison import training_result
from parts.comparison.plan_file import FOLDER
from parts.comparison.training_result import KEPT, TRAINED
from parts.comparison.trainings import keys_of, text
from pipeline.stage.artifacts import write_sealed
from pipeline.stage.keys import OUT
from pipeline.stage.lock import hold

INPUTS = ("download", "convert")
PATIENCE = 86400.0  # seconds that a training waits for another that makes the same


def trained(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a comparison's training; run it unless the result is stored."""
    content = text(tables)
    key, *of_inputs = keys_of(content, "train", *INPUTS)
    done, root = FOLDER / "done" / f"{key}.json", FOLDER / "runs" / key
    with hold(FOLDER / "locks" / key, PATIENCE):
        if not done.is_file():
            run_file = root / "run.toml"
            write_text(run_file, content)
            _link_inputs(run_file, root, FOLDER / "inputs" / "-".join(of_inputs))
            write_sealed(done, {"key": key, **_train(run_file, root)})
            shutil.rmtree(root)
    return training_result.read(done)


def _link_inputs(run_file: Path, root: Path, inputs: Path) -> None:
    with hold(inputs.with_name(f"{inputs.name}.lock"), PATIENCE):
        for stage in INPUTS:
            _run(stage, run_file, inputs)
            link = root / OUT[stage]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to((inputs / OUT[stage]).absolute())


def _train(run_file: Path, root: Path) -> dict[str, Any]:
    """Train for a comparison, and return the result; the loss is None if it diverged."""
    goes_on = (root / "data" / "runs").is_dir()
    began = time.perf_counter()
    try:
        peak = _run("train", run_file, root)
    except DivergedError as error:
        return {"status": "diverged", "loss": None, "why": str(error)}
    seconds = time.perf_counter() - began
    metrics = read_json(root / "metrics/train.json")
    if metrics["held_out_loss"] is None:
        raise LockstepError(f"{run_file}: it measured no held-out loss, expected held-out text")
    header, *lines = (root / "metrics/held_out.tsv").read_text(encoding="utf-8").splitlines()
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    transcript = Transcript(root / OUT["train"] / "transcript")
    took = [entry.decision.train_seconds for entry in transcript.rounds]
    last = transcript.folder / "snapshots" / f"{transcript.snapshots[-1]:05}"
    return {
        "status": "trained",
        "loss": metrics["held_out_loss"],
        **{name: metrics[name] for name in KEPT},
        "held_out_seen": read_json(root / OUT["download"] / "shards.json")["held_out_seen"],
        TRAINED: math.fsum(took),
        "params": read_json(last / "state.json")["params"],
        "peak_bytes": peak,
        "tokens_per_second": None if goes_on else metrics["tokens"] / seconds,
        "curve": [
            {
                "tokens": int(row["tokens"]),
                "bytes_up": int(row["bytes_up"]),
                TRAINED: math.fsum(took[: int(row["step"])]),
                "loss": float(row["held_out_loss"]),
            }
            for row in rows
        ],
    }


def _run(stage: str, run_file: Path, root: Path) -> int:
    """Run a stage of a comparison's training, and return its peak memory.

    Raises:
      DivergedError: The training diverged, by the exit status.
      LockstepError: It failed otherwise; the message is its last line.
    """
    compiled, path = str((FOLDER / "compiled").absolute()), os.pathsep.join(sys.path)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": compiled, "PYTHONPATH": path}
    environment.pop("DVC_ROOT", None)  # work in progress is beside the training
    command = [sys.executable, "-P", "-m", pipeline.__name__, stage]  # none of the user's folder
    command += ["--run", str(run_file.absolute()), "--root", str(root.absolute())]
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{stage}.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code < 0:  # as by the kernel, where memory is short
        raise LockstepError(
            f"{root / stage}.log: {stage} was ended by signal {-code}, expected it to end by itself"
        )
    if code:
        output = (root / f"{stage}.log").read_text(encoding="utf-8", errors="replace").strip()
        failed = DivergedError if code == DivergedError.status else LockstepError
        said = output.rpartition("\n")[2].removeprefix("error: ")
        raise failed(said or f"{stage}: ended with {code}")
    return usage.ru_maxrss * 1024
