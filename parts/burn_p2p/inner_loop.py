"""burn_p2p's inner loop: files go out, and files come back.

The worker, or a command, gets the params as a pack, the rows of each local step as a file, and the
state that its optimizer left in the round before. It gives back where its steps led to. So a class
that was written for burn_p2p works as it is.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError, StepError
from lockstep.files import read_json, sha256_file, write_json
from lockstep.optim.optimizer import Tree
from lockstep.tables.table import Table
from lockstep.tables.untrusted_values import Metrics, SaidPath
from lockstep.tables.validation import validate
from parts.burn_p2p.packs import Session, model_at, read_params, write_params
from pipeline.stage.untrusted_files import check_file

ROWS_FILE = "rows.json"  # beside the rows of each step: what a row is
LOSSES = ("loss", "train_loss", "loss_mean", "train_loss_mean")  # names of the metric, in order
MOST_STATE = 2**36  # bytes of an optimizer's state
JOB, RESULT = "job.json", "result.json"
VARIABLES = {JOB: "BURN_P2P_DILOCO_JOB_MANIFEST", RESULT: "BURN_P2P_DILOCO_RESULT_MANIFEST"}


class InnerLoopAnswer(Table, extra="ignore"):
    """An inner loop's result: a worker's answer, or a command's result.json."""

    steps_completed: Annotated[int, Field(ge=0)]
    metrics: Metrics = {}
    local_parameter_pack_path: SaidPath | None = None
    """Where the params are; by default where they were asked for."""
    inner_optimizer_state_path: SaidPath | None = None
    inner_optimizer_state_encoding: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None


def take(worker: Any, session: Session, job: Any) -> tuple[Tree, float, np.ndarray]:
    """Have a worker, or its run's command, take the local steps of a round.

    Args:
      worker: A `Worker` of `parts/workload`.
      session: Its process.
      job: A `Job` of `parts/workload`: params, lots, rates, state, name, seed.

    Returns:
      The params after them, their mean loss, and the state of the optimizer: the name of its
      encoding, a zero, and its bytes.

    Raises:
      LockstepError: They were not taken, or left something else than was expected.
    """
    folder = session.process.folder / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        request = _request(worker, session, job, folder)
        if worker.run.workload.inner == "command":
            result = _by_command(worker, session, request | {"job_id": job.name}, folder)
        else:
            result = _by_worker(session, request)
        return _steps(session, result, folder, len(job.lots))
    except StepError:  # of the worker, which says so
        raise
    except LockstepError as error:  # of a file that it left
        raise LockstepError(f"run_inner_loop: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- What goes out ----


def _request(worker: Any, session: Session, job: Any, folder: Path) -> dict[str, Any]:
    """Write what an inner loop's job needs into its folder, and return it as burn_p2p calls it."""
    description = session.description
    base = folder / "base"
    write_params(base, description, job.params)
    base_rate = worker.run.llm.lr_schedule.base_lr
    (folder / ROWS_FILE).write_text(json.dumps(worker.rows), encoding="utf-8")
    request = {
        "base_parameter_pack_path": str(base),
        "output_parameter_pack_path": str(folder / "local"),
        "model_schema_hash": description.code,
        "batches": [*_batches(worker, job.lots, folder)],
        "num_inner_steps": len(job.lots),
        "require_exact_steps": True,
        "state_dict_filter": worker.patterns,
        "learning_rates": [float(rate) for rate in job.rates],
        "learning_rate_factors": [float(rate) / base_rate for rate in job.rates],
        "seed": job.seed,
    }
    encoding, _, state = job.state.tobytes().partition(b"\0")
    if encoding:
        path = folder / "state.in"
        path.write_bytes(state)
        request["inner_optimizer_state_path"] = str(path)
        request["inner_optimizer_state_encoding"] = encoding.decode("ascii")
    return request


def _batches(worker: Any, lots: Sequence[np.ndarray], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield an inner loop's rows by step as burn_p2p lists cached micro-shards.

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


def _by_worker(session: Session, request: Mapping[str, Any]) -> dict:
    with model_at(session, Path(request["base_parameter_pack_path"])) as model:
        return session.process.call("run_inner_loop", {**request, "model_id": model})


# ---- What comes back ----


def _steps(
    session: Session, result: Mapping[str, Any], folder: Path, steps: int
) -> tuple[Tree, float, np.ndarray]:
    answer = validate(InnerLoopAnswer, dict(result), "its answer")
    if answer.steps_completed != steps:
        raise LockstepError(f"steps_completed is {answer.steps_completed}, expected {steps}")
    description = session.description
    place = Path(answer.local_parameter_pack_path or folder / "local")
    if not place.resolve().is_relative_to(folder.resolve()):
        raise LockstepError(f"local_parameter_pack_path is {place}, expected a path in its folder")
    params = read_params(place, description)
    loss = next((answer.metrics[name] for name in LOSSES if name in answer.metrics), None)
    if loss in ("nan", "inf", "-inf"):  # as JSON has them
        loss = float(loss)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        raise LockstepError(
            f"metrics are {[*answer.metrics]}, expected a number {' or '.join(LOSSES)} among them"
        )
    return params, float(loss), _state(answer, folder)


def _state(answer: InnerLoopAnswer, folder: Path) -> np.ndarray:
    if answer.inner_optimizer_state_path is None:
        return np.zeros(1, np.uint8)  # of no encoding
    path = Path(answer.inner_optimizer_state_path)
    check_file(path, folder, most=MOST_STATE)
    encoding = answer.inner_optimizer_state_encoding or "application/octet-stream"
    head = np.frombuffer(encoding.encode("ascii") + b"\0", np.uint8)
    return np.concatenate([head, np.fromfile(path, np.uint8)])


# ---- A command in the worker's place ----


def _by_command(worker: Any, session: Session, request: Mapping[str, Any], folder: Path) -> dict:
    """Run an inner loop's command in a folder of its own, and return what result.json says.

    It reads job.json and leaves result.json; their paths are in its arguments, where it asks for
    them, and in its environment.
    """
    workload, paths = worker.run.workload, {JOB: folder / JOB, RESULT: folder / RESULT}
    extra = {"factory": workload.factory, "config": workload.config}
    extra |= {"protocol_version": 1, "model_seed": workload.seed}
    write_json(paths[JOB], {**request, **extra, "result_manifest_path": str(paths[RESULT])})
    arguments = [
        word.replace("{job_manifest}", str(paths[JOB])).replace(
            "{result_manifest}", str(paths[RESULT])
        )
        for word in workload.command
    ]
    variables = {variable: str(paths[file]) for file, variable in VARIABLES.items()}
    session.process.run_command(arguments, folder, variables, workload.command_seconds)
    check_file(paths[RESULT], folder)
    return read_json(paths[RESULT])
