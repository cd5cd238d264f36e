"""A workload in its process, as a run uses it: params go in, losses and gradients come out."""

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.tables.explain import validate
from parts.workload import worker_models
from parts.workload.description import SOURCE, Description, check_factory, code_hash
from parts.workload.process.messages import WorkerError
from parts.workload.process.shared_arrays import SharedArrays
from parts.workload.process.watched import Watched
from parts.workload.process.worker_process import WorkerCommand, WorkerProcess
from parts.workload.worker_models import Started, text_of
from pipeline import runfile
from pipeline.stage.given_files import check_file
from pipeline.stage.keys import OUT

Reply = TypeVar("Reply")
RowSpec = dict[str, Any]
"""What a row of the data is: `rows` of a worker's method `begin`."""
# burn_p2p's methods say no number of threads, which decides bits, so the environment does
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GRADIENT = "gradient"  # the capability of our own worker, which burn_p2p's has not
NO_ROWS: RowSpec = {"kind": "tokens", "columns": ["inputs"], "length": 1}  # before there are data


class Worker:
    """The worker of a run's workload, which starts when it is first used, and again after a fault.

    Nothing is remembered between two calls, so whoever asks gets the same answer: a trainer, a
    verifier, an auditor.

    Args:
      run: The whole run.
      rows: What a row of its data is.
      expected: The workload's description from before the run; None to request it.
    """

    def __init__(self, run: runfile.Run, rows: RowSpec, expected: Description | None = None):
        check_factory(run)
        self.run, self.rows, self.expected = run, rows, expected
        self.shards = Path(OUT["download"])
        self.name = f"workload {run.workload.factory}"
        self._lock = threading.Lock()
        self._begun: Started | None = None
        self._watched: Watched | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    # ---- What it computes ----

    def describe(self) -> Description:
        """Return what the workload says of itself."""
        return self.ask(lambda begun: begun.description)

    @property
    def environment(self) -> dict[str, str]:
        """The settings of the worker's process that can change the bits of a result."""
        found = self.ask(lambda begun: begun.process.hello.environment)
        told = {f"worker_{name}": str(value) for name, value in found.items()}
        return told | {"worker_threads": str(self.run.peers.threads)}  # it is told how many

    @property
    def evaluates(self) -> bool:
        """Whether the workload has its own metrics, as those written for burn_p2p have."""
        return "evaluate" in self.capabilities or GRADIENT not in self.capabilities

    @property
    def measures(self) -> bool:
        """Whether the workload can measure the loss of any row."""
        return "measure" in self.capabilities and GRADIENT in self.capabilities

    @property
    def capabilities(self) -> frozenset[str]:
        """What the workload can do."""
        return self.ask(lambda begun: begun.process.hello.capabilities)

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns of what travels, as burn_p2p calls them."""
        workload = self.run.workload
        return {"include_globs": [*workload.include], "exclude_globs": [*workload.exclude]}

    def init(self) -> Tree:
        """Return the workload's initial params: nested dicts of float32 arrays."""

        def ask(begun: Started) -> Tree:
            if begun.arrays is None:
                return worker_models.initial(begun)
            begun.process.call("init", {})
            if not np.isfinite(begun.arrays.params).all():
                raise self._error("init", "a param that is no finite number", "finite ones")
            return begun.description.tree(begun.arrays.params)

        return self.ask(ask)

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
            return loss, begun.description.tree(begun.arrays.gradients)

        return self.ask(ask)

    def measure(self, params: Tree, rows_NW: np.ndarray) -> np.ndarray:
        """Return the loss of each row: float32 [N]; NaN where it is no finite number."""

        def ask(begun: Started) -> np.ndarray:
            losses = begun.process.call("measure", _put(begun, params, rows_NW)).get("losses")
            if not isinstance(losses, list) or len(losses) != len(rows_NW):
                raise self._error("measure", f"{_short(losses)}", f"{len(rows_NW)} losses")
            found = [self._number({"loss": loss}, "loss", "measure") for loss in losses]
            return np.array(found, np.float32)

        return self.ask(ask)

    def evaluate(self, params: Tree, split: str) -> dict[str, float | int | str | bool]:
        """Return the workload's own metrics at these params, on a split of the data."""

        def ask(begun: Started) -> dict[str, Any]:
            if begun.arrays is None:
                with worker_models.model_of(begun, params) as model:
                    return begun.process.call("evaluate", {"model_id": model, "split": split})
            _put_params(begun, params)
            return begun.process.call("evaluate_params", {"split": split})

        metrics = self.ask(ask).get("metrics")
        if not isinstance(metrics, dict):
            raise self._error("evaluate", f"metrics = {_short(metrics)}", "a table")
        return metrics

    def dataset(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the workload's own data: arrays [N, ...] by split and name, from their files."""

        def ask(begun: Started) -> dict[str, dict[str, np.ndarray]]:
            return {split: self._arrays_of(begun, split) for split in ("train", "held_out")}

        return self.ask(ask)

    def save(self, params: Tree, folder: Path) -> None:
        """Have the workload write its model, at these params, into an empty folder."""

        def ask(begun: Started) -> None:
            _put_params(begun, params)
            begun.process.call("save_params", {"path": str(folder.absolute())})

        self.ask(ask)

    def close(self) -> None:
        """End the process.

        Raises:
          LockstepError: It changed files that are not its own.
        """
        with self._lock:
            self._end()
        watched, self._watched = self._watched, None
        if watched and sys.exc_info()[0] is None:  # else something worse is under way
            watched.check(self.name)

    # ---- Its process ----

    def ask(self, ask: Callable[[Started], Reply]) -> Reply:
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
        if self._watched is None:
            # before a run begins, stage convert may be making its result beside another stage
            begun = [Path(OUT["convert"])] if self.expected else []
            self._watched = Watched((SOURCE, *begun))
        process = WorkerProcess.start(_command(self.run), folder)
        try:
            self._check_able(process)
            probe = process.call("capability_probe", {})
            device = text_of(probe, "runtime_device", f"{self.name}: capability_probe")
            asked = {"state_dict_filter": self.patterns, "seed": self.run.workload.seed}
            if GRADIENT not in process.hello.capabilities:
                return Started(process, self._planned(process, device), device, None, asked)
            told = self._described(process)
            arrays = SharedArrays(folder, told.parameters, 0)
            _share(process, arrays)
        except BaseException:
            process.close()
            raise
        return Started(process, told, device, arrays, asked)

    def _check_able(self, process: WorkerProcess) -> None:
        """Check that the worker can do what the run asks of it."""
        needed = {"gradient": GRADIENT, "worker": "diloco_checkpoint_job"}
        needs, found = needed.get(self.run.workload.inner), process.hello.capabilities
        if needs and needs not in found:
            text = f"{needs} among them with workload.inner = {self.run.workload.inner}"
            raise self._error("hello", f"capabilities {', '.join(sorted(found))}", text)

    def _described(self, process: WorkerProcess) -> Description:
        """Return our own worker's description of its model."""
        asked = {
            "rows": self.rows | self._place(),
            "micro_batch": self.run.peers.micro_batch,
            "threads": self.run.peers.threads,
            "state_dict_filter": self.patterns,
            "seed": self.run.workload.seed,
        }
        answer = process.call("begin", asked)
        answer.pop("parameter_count", None)  # of the tensors
        found = self._checked(answer, "begin")
        self._check_patterns(found)
        return found

    def _place(self) -> dict[str, str]:
        """Return where rows that are files lie; a transcript does not record it."""
        if self.rows["kind"] != "files":
            return {}
        return {"folder": str((self.shards / self.rows["folder"]).absolute())}

    def _planned(self, process: WorkerProcess, device: str) -> Description:
        """Return any worker's description of its packs; one without shapes has a single tensor."""
        method = "parameter_pack_plan"
        seed = self.run.workload.seed
        asked = {"device": device, "state_dict_filter": self.patterns, "seed": seed}
        plan = process.call(method, asked)
        whole = {"name": "values", "shape": [plan.get("parameter_count")], "dtype": "float32"}
        excluded = plan.get("excluded_float_keys", [])
        answer = {
            "tensors": plan.get("tensors", [whole]),
            "frozen": [{"name": name, "why": "excluded"} for name in excluded],
            "integers": plan.get("ignored_non_float_keys"),
            "tied": plan.get("tied", {}),
            "layout_hash": plan.get("layout_hash"),
            "frozen_sha256": None,
        }
        if not plan.get("parameter_count"):
            raise self._error(method, "no numbers that travel", "some; see workload.include")
        return self._checked(answer, method)

    def _checked(self, answer: dict, method: str) -> Description:
        """A description that fits what the run began with."""
        known = {"factory": self.run.workload.factory, "code": code_hash(self.run)}
        found = validate(Description, answer | known, f"{self.name}: {method}")
        for name in Description.model_fields if self.expected else ():
            here, there = getattr(found, name), getattr(self.expected, name)
            if here != there:
                text = f"{_short(there)} as the run began with"
                raise self._error(method, f"{name} is {_short(here)}", text)
        return found

    def _check_patterns(self, found: Description) -> None:
        """Check that each pattern fits a tensor: a typo would train what was to stay as it is."""
        kept = (tensor.name for tensor in (*found.tensors, *found.frozen))
        names = sorted({*kept, *found.integers, *found.tied})
        for key in ("include", "exclude"):
            for pattern in getattr(self.run.workload, key):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise LockstepError(
                        f"workload.{key} has {pattern!r}, expected a pattern that fits a tensor, "
                        f"as {', '.join(names[:8])}"
                    )

    def _end(self) -> None:
        begun, self._begun = self._begun, None
        if begun:
            with suppress(WorkerError):
                begun.process.close()

    def _arrays_of(self, begun: Started, split: str) -> dict[str, np.ndarray]:
        folder = begun.process.folder / f"dataset-{split}"
        listed = begun.process.call("dataset", {"split": split, "path": str(folder)}).get("arrays")
        if not isinstance(listed, list):
            raise self._error("dataset", f"arrays = {_short(listed)}", "a list")
        found = {}
        for one in listed:
            name = text_of(one if isinstance(one, dict) else {}, "name", f"{self.name}: dataset")
            file = folder / f"{name}.npy"
            check_file(file, folder)
            try:
                found[name] = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise self._error("dataset", f"{file.name}: {error}", "an array") from error
        return found

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
        env=dict.fromkeys(THREADS, str(run.peers.threads)) | runtime.worker_env,
        start_seconds=runtime.worker_start_seconds,
        answer_seconds=runtime.answer_seconds,
    )


def _share(process: WorkerProcess, arrays: SharedArrays) -> None:
    """Have the worker map the file, of which then nobody needs the name."""
    try:
        process.call("open_arrays", arrays.request())
    finally:
        arrays.forget()


def _put(begun: Started, params: Tree, rows_NW: np.ndarray) -> dict[str, int]:
    """Copy params and rows to where the worker reads them, and return how many rows these are."""
    count, width = rows_NW.shape
    if begun.arrays.rows.size < count * width:  # another file, so before anything is written
        begun.arrays.grow_rows(4 * count * width)
        _share(begun.process, begun.arrays)
    begun.arrays.rows[: count * width] = rows_NW.reshape(-1)
    _put_params(begun, params)
    return {"rows": count, "width": width}


def _put_params(begun: Started, params: Tree) -> None:
    at, flat = 0, begun.arrays.params
    for leaf in begun.description.leaves(params):
        array = np.asarray(leaf)
        flat[at : at + array.size] = array.reshape(-1)
        at += array.size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
