"""Local steps that a workload takes by its own optimizer: all those of a round at once.

Files go out, and files come back. The worker, or a command, gets the params as a pack, the rows of
each local step as a file, and the state that its optimizer left in the round before. It gives back
where its steps led to. This is burn_p2p's inner loop, so a class that was written for that works as
it is. What its optimizer goes on with, bytes of any length, is a part of what a peer owns: it is in
checkpoints, snapshots and the hashes that peers commit to.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file, write_json
from lockstep.optim.optimizer import Optimizer, Tree, inside
from lockstep.optim.schedules import LearningRate
from lockstep.programs.local_training import Agreed, HostSteps, Lots, Work
from lockstep.tables.answers import Metrics, SaidPath
from lockstep.tables.explain import validate
from lockstep.tables.table import Table
from parts.workload.process.child_group import ChildGroup
from parts.workload.process.messages import WorkerError
from parts.workload.worker import Worker
from parts.workload.worker_models import WorkerSession, model_at, read_params, write_params
from pipeline.stage.untrusted_files import check_file

ROWS = "rows.json"  # beside the rows of each step: what a row is
LOSSES = ("loss", "train_loss", "loss_mean", "train_loss_mean")  # names of the metric, in order
NO_STATE = np.zeros(1, np.uint8)  # a zero after no encoding: checkpoints hold no empty arrays
MOST_STATE = 2**36  # bytes of an optimizer's state
JOB, RESULT, LOG = "job.json", "result.json", "command.log"
VARIABLES = {JOB: "BURN_P2P_DILOCO_JOB_MANIFEST", RESULT: "BURN_P2P_DILOCO_RESULT_MANIFEST"}


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
    metrics: Metrics = {}
    local_parameter_pack_path: SaidPath | None = None
    """Where the params are; by default where they were asked for."""
    inner_optimizer_state_path: SaidPath | None = None
    inner_optimizer_state_encoding: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None


def take(worker: Worker, job: Job) -> StepsTaken:
    """Have the worker, or the run's command, take the local steps of a round.

    Raises:
      WorkerError: It did not, or left something else than was expected.
    """
    return worker.ask(lambda session: _take(worker, session, job))


def _take(worker: Worker, session: WorkerSession, job: Job) -> StepsTaken:
    folder = session.process.folder / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        request = _request(worker, session, job, folder)
        if worker.run.workload.inner == "command":
            result = _by_command(worker, session, request | {"job_id": job.name}, folder)
        else:
            result = _by_worker(session, request)
        return _steps(worker, session, result, folder, len(job.lots))
    except WorkerError:
        raise
    except LockstepError as error:  # of a file that it left
        raise WorkerError(f"{worker.name}: run_inner_loop: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- What goes out ----


def _request(worker: Worker, session: WorkerSession, job: Job, folder: Path) -> dict[str, Any]:
    """Write what the job needs into its folder, and return it as burn_p2p calls it."""
    description = session.description
    base = folder / "base"
    write_params(base, description, job.params)
    base_rate = worker.run.llm.lr_schedule.base_lr
    (folder / ROWS).write_text(json.dumps(worker.rows), encoding="utf-8")
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


def _by_worker(session: WorkerSession, request: Mapping[str, Any]) -> dict:
    with model_at(session, Path(request["base_parameter_pack_path"])) as model:
        return session.process.call("run_inner_loop", {**request, "model_id": model})


# ---- What comes back ----


def _steps(
    worker: Worker, session: WorkerSession, result: Mapping[str, Any], folder: Path, steps: int
) -> StepsTaken:
    answer = validate(InnerLoopAnswer, dict(result), "its answer")
    if answer.steps_completed != steps:
        raise WorkerError(
            f"{worker.name}: run_inner_loop: steps_completed is {answer.steps_completed}, "
            f"expected {steps}"
        )
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
    return StepsTaken(params, float(loss), _state(answer, folder))


def _state(answer: InnerLoopAnswer, folder: Path) -> np.ndarray:
    if answer.inner_optimizer_state_path is None:
        return NO_STATE
    path = Path(answer.inner_optimizer_state_path)
    check_file(path, folder, most=MOST_STATE)
    encoding = answer.inner_optimizer_state_encoding or "application/octet-stream"
    head = np.frombuffer(encoding.encode("ascii") + b"\0", np.uint8)
    return np.concatenate([head, np.fromfile(path, np.uint8)])


# ---- A command in the worker's place ----


def _by_command(
    worker: Worker, session: WorkerSession, request: Mapping[str, Any], folder: Path
) -> dict:
    """Run the workload's command in a folder of its own, and return what result.json says.

    It reads job.json and leaves result.json; their paths are in its arguments, where it asks for
    them, and in its environment, otherwise the worker's. It may start processes of its own, as
    torchrun does.

    Raises:
      WorkerError: It cannot be started, takes too long, or fails.
      LockstepError: There is no result.json, or no JSON in it.
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
    environment = session.process.command.environment()
    environment |= {variable: str(paths[file]) for file, variable in VARIABLES.items()}
    try:
        group = ChildGroup.start(arguments, folder, environment, folder / LOG)
    except LockstepError as error:
        raise WorkerError(f"{worker.name}: command: {error}") from None
    try:
        with suppress(subprocess.TimeoutExpired):
            group.child.wait(workload.command_seconds)
        ending = group.ended()
    finally:
        group.kill()  # what it started, too
    if ending is None:
        raise WorkerError(
            f"{worker.name}: command: still running after {workload.command_seconds:g} seconds, "
            "expected its end"
        )
    if group.child.returncode:
        last = group.log.last_line()
        raise WorkerError(
            f"{worker.name}: command: {ending}, expected status 0" + (f": {last}" if last else "")
        )
    check_file(paths[RESULT], folder)
    return read_json(paths[RESULT])


# ---- As the steps of a peer ----


class WorkloadOwn(NamedTuple):
    """What a peer owns where a workload takes its local steps.

    Attributes:
      optimizer: `own` of the run's optimizer.
      state: What the workload's optimizer goes on with: uint8, of any length.
    """

    optimizer: Tree
    state: jax.Array


def with_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose `own` has a workload's state beside it.

    Its functions never see the state, whose length would compile them anew.
    """

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        return WorkloadOwn(own, jnp.asarray(NO_STATE)), shared

    return inside(optimizer)._replace(init=init)


class InnerSteps(HostSteps):
    """Local steps by a workload's own optimizer; `Stepper`.

    They reach the run's optimizer as one: theta_p <- theta_p - (theta_p - where they led to).

    Args:
      optimizer: How peers train, without the workload's state; its inner optimizer is SGD with a
        learning rate of 1.
      lots: How rows are divided among local steps.
      worker: Takes the steps.
      seed: Seed of their randomness.
      learning_rate: The run's schedule, which the workload is told.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lots: Lots,
        worker: Worker,
        seed: int,
        learning_rate: LearningRate,
    ):
        super().__init__(optimizer, lots, worker, seed)
        self.worker, self.learning_rate = worker, learning_rate

    def take(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return a peer's state after the steps, and their mean loss."""
        steps, round_ = self.lots.steps, int(step)
        inner = self.align_before(own.optimizer, agreed.params, step, np.int32(0))
        rows_HNW = [rows_NW for rows_NW in self.lots.rows(work) if rows_NW is not None]
        if not rows_HNW:
            return own._replace(optimizer=inner), jnp.float32(0)
        done = self.rounds_done(step, steps - 1)
        ahead = self.optimizer.lookahead(agreed.params, inner, agreed.shared, done)
        seed = self.seed_of(round_, 0, rows_HNW)
        rates = [np.float32(round_ - 1 + (h + 1) / steps) for h in range(len(rows_HNW))]
        result = take(
            self.worker,
            Job(
                params=ahead,
                lots=rows_HNW,
                rates=[float(np.asarray(self.learning_rate(rate))) for rate in rates],
                state=np.asarray(own.state),
                name=f"inner-{round_:05}-{seed:08x}",
                seed=seed,
            ),
        )
        drift = jax.tree.map(lambda x, after: np.asarray(x) - after, ahead, result.params)
        after = self.optimizer.accumulate(drift, inner, agreed.params, done)
        return WorkloadOwn(after, result.state), jnp.float32(result.loss)
