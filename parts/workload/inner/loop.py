"""Local steps by a workload's own optimizer: files go out, and files come back.

The worker, or a command, gets the params as a pack, the rows of each local step as a file, and the
state that its optimizer left in the round before. It gives back where its steps led to. This is
burn_p2p's inner loop, so a class that was written for that works as it is.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from lockstep.optim.optimizer import Tree
from lockstep.tables.explain import validate
from lockstep.tables.table import Table
from parts.workload.inner import command
from parts.workload.process.messages import WorkerError
from parts.workload.worker import Worker
from parts.workload.worker_models import Started, model_at, read_params, write_params
from pipeline.stage.given_files import check_file

ROWS = "rows.json"  # beside the rows of each step: what a row is
LOSSES = ("loss", "train_loss", "loss_mean", "train_loss_mean")  # names of the metric, in order
NO_STATE = np.zeros(1, np.uint8)  # a zero after no encoding: checkpoints hold no empty arrays
MOST_STATE = 2**36  # bytes of an optimizer's state


class StepsTaken(NamedTuple):
    """The result of a round's local steps.

    params: The peer's params. loss: The mean loss of the steps. state: What the optimizer goes on
    with: the name of its encoding, a zero, and its bytes.
    """

    params: Tree
    loss: float
    state: np.ndarray


class Job(NamedTuple):
    """The work for an inner loop.

    params: Where the steps begin. lots: Rows of each step, int32 [N, W]. rates: Learning rate of
    each step. state: As in `StepsTaken`; at first `NO_STATE`. name: What tells it from all others.
    seed: Of its randomness.
    """

    params: Tree
    lots: Sequence[np.ndarray]
    rates: Sequence[float]
    state: np.ndarray
    name: str
    seed: int


class InnerLoopAnswer(Table, extra="ignore"):
    """An inner loop's result: a worker's answer, or a command's result.json."""

    steps_completed: Annotated[int, Field(ge=0)]
    metrics: dict[str, bool | int | float | str] = {}
    local_parameter_pack_path: str | None = None
    """Where the params are; by default where they were asked for."""
    inner_optimizer_state_path: str | None = None
    inner_optimizer_state_encoding: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None


def take(worker: Worker, job: Job) -> StepsTaken:
    """Have the worker, or the run's command, take the local steps of a round.

    Raises:
      WorkerError: It did not, or left something else than was expected.
    """
    return worker.ask(lambda begun: _take(worker, begun, job))


def _take(worker: Worker, begun: Started, job: Job) -> StepsTaken:
    folder = begun.process.folder / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        asked = _request(worker, begun, job, folder)
        workload = worker.run.workload
        if workload.inner == "command":
            made_of = {"factory": workload.factory, "config": workload.config}
            of_command = {"protocol_version": 1, "job_id": job.name, "model_seed": workload.seed}
            said = command.run(
                worker.name,
                workload.command,
                asked | made_of | of_command,
                folder,
                begun.process.command.environment(),
                workload.command_seconds,
            )
        else:
            said = _by_worker(begun, asked)
        return _steps(worker, begun, said, folder, len(job.lots))
    except WorkerError:
        raise
    except LockstepError as error:  # of a file that it left
        raise WorkerError(f"{worker.name}: run_inner_loop: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- What goes out ----


def _request(worker: Worker, begun: Started, job: Job, folder: Path) -> dict[str, Any]:
    """Write what the job needs into its folder, and return it as burn_p2p calls it."""
    told = begun.description
    base = folder / "base"
    write_params(base, told, job.params)
    (folder / ROWS).write_text(json.dumps(worker.rows), encoding="utf-8")
    asked = {
        "base_parameter_pack_path": str(base),
        "output_parameter_pack_path": str(folder / "local"),
        "model_schema_hash": told.code,
        "batches": [*_batches(worker, job.lots, folder)],
        "num_inner_steps": len(job.lots),
        "require_exact_steps": True,
        "state_dict_filter": worker.patterns,
        "learning_rates": [float(rate) for rate in job.rates],
        "seed": job.seed,
    }
    encoding, _, state = job.state.tobytes().partition(b"\0")
    if encoding:
        path = folder / "state.in"
        path.write_bytes(state)
        asked["inner_optimizer_state_path"] = str(path)
        asked["inner_optimizer_state_encoding"] = encoding.decode("ascii")
    return asked


def _batches(worker: Worker, lots: Sequence[np.ndarray], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the steps as burn_p2p lists cached micro-shards.

    Rows that are files are the user's own, a group for each step. Others are written to a file for
    each step, in one group.
    """
    if worker.rows["kind"] == "files":
        files = worker.shards.absolute() / worker.rows["folder"]
        for rows_NW in lots:
            names = [row_W.astype("<i4").tobytes().hex() for row_W in rows_NW]
            for name in names:
                check_file(files / name, files)
            yield _group([files / name for name in names], names)
        return
    paths = [folder / f"step-{number:05}.npy" for number in range(len(lots))]
    for path, rows_NW in zip(paths, lots, strict=True):
        np.save(path, np.ascontiguousarray(rows_NW), allow_pickle=False)
    yield _group(paths, [sha256_file(path) for path in paths])


def _group(paths: Sequence[Path], hashes: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": "cached_microshard_group",
        "shard_paths": [str(path) for path in paths],
        "microshard_ids": [*hashes],
        "ordinals": [*range(len(paths))],
        "bytes_len": sum(path.stat().st_size for path in paths),
    }


def _by_worker(begun: Started, asked: Mapping[str, Any]) -> dict:
    with model_at(begun, Path(asked["base_parameter_pack_path"])) as model:
        return begun.process.call("run_inner_loop", {**asked, "model_id": model})


# ---- What comes back ----


def _steps(
    worker: Worker, begun: Started, said: Mapping[str, Any], folder: Path, steps: int
) -> StepsTaken:
    answer = validate(InnerLoopAnswer, dict(said), "its answer")
    if answer.steps_completed != steps:
        raise WorkerError(
            f"{worker.name}: run_inner_loop: steps_completed is {answer.steps_completed}, "
            f"expected {steps}"
        )
    told = begun.description
    place = Path(answer.local_parameter_pack_path or folder / "local")
    if not place.resolve().is_relative_to(folder.resolve()):
        raise LockstepError(f"local_parameter_pack_path is {place}, expected a path in its folder")
    params = read_params(place, told)
    loss = next((answer.metrics[name] for name in LOSSES if name in answer.metrics), None)
    if loss in ("nan", "inf", "-inf"):  # as JSON has them
        loss = float(loss)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        raise LockstepError(
            f"metrics are {[*answer.metrics]}, expected a number {' or '.join(LOSSES)} among them"
        )
    return StepsTaken(params, float(loss), _state(answer, folder))


def _state(answer: InnerLoopAnswer, folder: Path) -> np.ndarray:
    if answer.inner_optimizer_state_path is None:
        return NO_STATE
    path = Path(answer.inner_optimizer_state_path)
    check_file(path, folder, most=MOST_STATE)
    encoding = answer.inner_optimizer_state_encoding or "application/octet-stream"
    head = np.frombuffer(encoding.encode("ascii") + b"\0", np.uint8)
    return np.concatenate([head, np.fromfile(path, np.uint8)])
