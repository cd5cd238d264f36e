"""A workload in its process, as a run uses it: params go in, losses and gradients come out."""

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.runfile.explain import validate
from pipeline.workload.description import SOURCE, Description, check_factory, code_hash
from pipeline.workload.shared_arrays import SharedArrays
from pipeline.workload.worker_process import WorkerCommand, WorkerError, WorkerProcess

Reply = TypeVar("Reply")
RowSpec = dict[str, Any]
"""What a row of the data is: `rows` of a worker's method `begin`."""
NO_ROWS: RowSpec = {"kind": "tokens", "columns": ["inputs"], "length": 1}  # before there are data


class Started(NamedTuple):
    """A worker's process that has begun the run's model."""

    process: WorkerProcess
    arrays: SharedArrays
    description: Description


class Worker:
    """The worker of a run's workload, which starts when it is first used, and again after a fault.

    Nothing is remembered between two calls, so whoever asks gets the same answer: a trainer, a
    verifier, an auditor.

    Args:
      run: The whole run.
      rows: What a row of its data is.
      expected: What the workload said before the run; None to ask it.
    """

    def __init__(self, run: runfile.Run, rows: RowSpec, expected: Description | None = None):
        check_factory(run)
        self.run, self.rows, self.expected = run, rows, expected
        self.name = f"workload {run.workload.factory}"
        self._lock = threading.Lock()
        self._begun: Started | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    # ---- What it computes ----

    def describe(self) -> Description:
        """Return what the workload says of itself."""
        return self._with(lambda begun: begun.description)

    @property
    def environment(self) -> dict[str, str]:
        """What of the worker's process can change the bits of a result."""
        found = self._with(lambda begun: begun.process.hello.environment)
        told = {f"worker_{name}": str(value) for name, value in found.items()}
        return told | {"worker_threads": str(self.run.peers.threads)}  # it is told how many

    @property
    def capabilities(self) -> frozenset[str]:
        """What the workload can do."""
        return self._with(lambda begun: begun.process.hello.capabilities)

    def init(self) -> Tree:
        """Return the workload's initial params: nested dicts of float32 arrays."""

        def ask(begun: Started) -> Tree:
            begun.process.call("init", {})
            if not np.isfinite(begun.arrays.params).all():
                raise self._error("init", "a param that is no finite number", "finite ones")
            return _tree(begun, begun.arrays.params)

        return self._with(ask)

    def gradient(self, params: Tree, rows_NW: np.ndarray, seed: int) -> tuple[float, Tree]:
        """Return the mean loss of some rows, and its gradient.

        Args:
          params: Nested dicts of float32 arrays.
          rows_NW: int32, a row at least.
          seed: Of all randomness in it.
        """

        def ask(begun: Started) -> tuple[float, Tree]:
            where = _put(begun, params, rows_NW)
            answer = begun.process.call("gradient", where | {"seed": seed})
            loss = self._number(answer, "loss", "gradient")
            return loss, _tree(begun, begun.arrays.gradients)

        return self._with(ask)

    def measure(self, params: Tree, rows_NW: np.ndarray) -> np.ndarray:
        """Return the loss of each row: float32 [N]; NaN where it is no finite number."""

        def ask(begun: Started) -> np.ndarray:
            losses = begun.process.call("measure", _put(begun, params, rows_NW)).get("losses")
            if not isinstance(losses, list) or len(losses) != len(rows_NW):
                raise self._error("measure", f"{_short(losses)}", f"{len(rows_NW)} losses")
            found = [self._number({"loss": loss}, "loss", "measure") for loss in losses]
            return np.array(found, np.float32)

        return self._with(ask)

    def evaluate(self, params: Tree, split: str) -> dict[str, float | int | str | bool]:
        """Return the workload's own metrics at these params, on a split of the data."""

        def ask(begun: Started) -> dict[str, Any]:
            _put_params(begun, params)
            return begun.process.call("evaluate_params", {"split": split})["metrics"]

        return self._with(ask)

    def save(self, params: Tree, folder: Path) -> None:
        """Have the workload write its model, at these params, into an empty folder."""

        def ask(begun: Started) -> None:
            _put_params(begun, params)
            begun.process.call("save_params", {"path": str(folder)})

        self._with(ask)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    # ---- Its process ----

    def _with(self, ask: Callable[[Started], Reply]) -> Reply:
        """Ask the process, which is started if there is none, and ended if it fails."""
        with self._lock:
            if self._begun is None:
                self._begun = self._begin()
            try:
                return ask(self._begun)
            except BaseException:
                self._end()
                raise

    def _begin(self) -> Started:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lockstep-worker-")
        folder = Path(self._folder.name)
        process = WorkerProcess.start(_command(self.run), folder)
        try:
            description = self._description(process)
            arrays = SharedArrays(folder, description.parameters, 0)
            process.call("open_arrays", arrays.request())
        except BaseException:
            process.close()
            raise
        return Started(process, arrays, description)

    def _description(self, process: WorkerProcess) -> Description:
        if "gradient" not in process.hello.capabilities:
            raise self._error(
                "hello", f"capabilities {sorted(process.hello.capabilities)}", "gradient in it"
            )
        workload = self.run.workload
        patterns = {"include_globs": [*workload.include], "exclude_globs": [*workload.exclude]}
        asked = {
            "rows": self.rows,
            "micro_batch": self.run.peers.micro_batch,
            "threads": self.run.peers.threads,
            "state_dict_filter": patterns,
            "seed": workload.seed,
        }
        answer = process.call("begin", asked)
        answer.pop("parameter_count", None)  # of the tensors
        known = {"factory": workload.factory, "code": code_hash(self.run)}
        document = answer | known
        found = validate(Description, document, f"{self.name}: begin")
        for name in Description.model_fields if self.expected else ():
            here, there = getattr(found, name), getattr(self.expected, name)
            if here != there:
                text = f"{_short(there)} as the run began with"
                raise self._error("begin", f"{name} is {_short(here)}", text)
        return found

    def _end(self) -> None:
        begun, self._begun = self._begun, None
        if begun:
            with suppress(WorkerError):
                begun.process.close()
            begun.arrays.close()

    def _number(self, answer: dict, key: str, method: str) -> float:
        """A float of an answer, which has null where it is not finite."""
        value = answer.get(key, "nothing")
        if value is None:
            return float("nan")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(method, f"{key} is {_short(value)}", "a number or null")
        return float(value)

    def _error(self, method: str, found: str, expected: str) -> LockstepError:
        return WorkerError(f"{self.name}: {method}: {found}, expected {expected}")


def _command(run: runfile.Run) -> WorkerCommand:
    runtime, workload = run.runtime, run.workload
    return WorkerCommand(
        python=runtime.worker_python or sys.executable,
        module=runtime.worker_module,
        factory=workload.factory,
        config=workload.config,
        path=(SOURCE, *map(Path, runtime.worker_path)),
        env=runtime.worker_env,
        start_seconds=runtime.worker_start_seconds,
        answer_seconds=runtime.answer_seconds,
    )


def _put(begun: Started, params: Tree, rows_NW: np.ndarray) -> dict[str, int]:
    """Copy params and rows to where the worker reads them, and return how many rows these are."""
    count, width = rows_NW.shape
    if begun.arrays.rows.size < count * width:  # another file, so before anything is written
        begun.arrays.grow_rows(4 * count * width)
        begun.process.call("open_arrays", begun.arrays.request())
    begun.arrays.rows[: count * width] = rows_NW.reshape(-1)
    _put_params(begun, params)
    return {"rows": count, "width": width}


def _put_params(begun: Started, params: Tree) -> None:
    at, flat = 0, begun.arrays.params
    for leaf in begun.description.leaves(params):
        array = np.asarray(leaf)
        flat[at : at + array.size] = array.reshape(-1)
        at += array.size


def _tree(begun: Started, flat: np.ndarray) -> Tree:
    """Copies of what the worker wrote, as nested dicts."""
    leaves, at = [], 0
    for tensor in begun.description.tensors:
        size = int(np.prod(tensor.shape))
        leaves.append(flat[at : at + size].reshape(tensor.shape).copy())
        at += size
    return begun.description.nested(leaves)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
