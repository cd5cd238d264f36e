"""A workload in its process, as a run uses it: params go in, losses and gradients come out."""

import hashlib
import logging
import math
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lockstep.errors import LockstepError, expecting
from lockstep.optim.optimizer import Tree
from lockstep.programs.permutation import permute
from lockstep.tables.untrusted_values import Metrics
from lockstep.tables.validation import validate
from parts.workload.description import SOURCE, Description, code_hash, files_of
from parts.workload.process.messages import WorkerDiedError, WorkerError
from parts.workload.process.shared_arrays import SharedArrays
from parts.workload.process.worker_process import LOG, WorkerCommand, WorkerProcess
from parts.workload.tables import runtime_of, workload_of
from pipeline import runfile
from pipeline.joints import Joint, Offered
from pipeline.stage.keys import OUT
from pipeline.stage.untrusted_files import A_FILE_OF_ARRAYS, check_file, walk
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
RowSpec = dict[str, Any]
"""What a row of the data is: `rows` of a worker's method `begin`."""
# burn_p2p's methods say no number of threads, which decides bits, so the environment does
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GRADIENT = "gradient"  # the capability of our own worker, which burn_p2p's has not
NEEDED = {"gradient": GRADIENT, "worker": "diloco_checkpoint_job"}  # of `workload.inner`
COUNTED_ROWS = 1024  # of the train split, over which statistics of batch norms are computed
NO_ROWS: RowSpec = {"kind": "tokens", "columns": ["inputs"], "length": 1}  # before there are data


class WorkerSession(NamedTuple):
    """A worker's process, what it said of the run's model, its device, and what is shared.

    Without arrays it computes no gradients, as a class that was written for burn_p2p. `asked` are
    what decides a new model: patterns of what travels, and the seed.
    """

    process: WorkerProcess
    description: Description
    device: str
    arrays: SharedArrays | None
    asked: dict[str, Any]


class Worker:
    """The worker of a run's workload, which starts when it is first used, and again after a fault.

    Nothing is remembered between two calls, so whoever asks gets the same answer: a trainer, a
    verifier, an auditor.

    Args:
      run: The whole run.
      rows: What a row of its data is.
      expected: The workload's description from before the run; None to request it.
      for_training: Whether it must be able to do what the run asks of it.
    """

    def __init__(
        self,
        run: runfile.Run,
        rows: RowSpec,
        expected: Description | None = None,
        *,
        for_training: bool = True,
    ):
        files_of(run)  # or it is refused at once
        if workload_of(run).inner != "gradient":
            inner_loops()
        self.run, self.rows, self.expected, self.for_training = run, rows, expected, for_training
        self.shards = Path(OUT["download"])
        self.name = f"workload {workload_of(run).factory}"
        self._lock = threading.Lock()
        self._session: WorkerSession | None = None
        self._counted: tuple[bytes, dict] = b"", {}  # hash of the params, and statistics at these
        self._facts: dict[Path, tuple] | None = None  # of files that it must not change
        self._folder: tempfile.TemporaryDirectory | None = None

    # ---- What it computes ----

    def describe(self) -> Description:
        """Return what the worker's workload says of itself."""
        return self.ask(lambda session: session.description)

    @property
    def environment(self) -> dict[str, str]:
        """The settings of the worker's process that can change the bits of a result."""
        environment = self.ask(lambda session: session.process.hello.environment)
        settings = {f"worker_{name}": value for name, value in environment.items()}
        return settings | {"worker_threads": str(self.run.peers.threads)}  # which the run sets

    @property
    def evaluates(self) -> bool:
        """Whether the worker's workload has its own metrics, as those for burn_p2p have."""
        return "evaluate" in self.capabilities or GRADIENT not in self.capabilities

    @property
    def measures(self) -> bool:
        """Whether the worker's workload can measure the loss of any row."""
        return "measure" in self.capabilities and GRADIENT in self.capabilities

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the worker's workload can do."""
        return self.ask(lambda session: session.process.hello.capabilities)

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns of what of the workload travels, as burn_p2p calls them."""
        workload = workload_of(self.run)
        return {"include_globs": [*workload.include], "exclude_globs": [*workload.exclude]}

    @cached_property
    def rows_to_count(self) -> np.ndarray | None:
        """Rows over which statistics of batch norms are computed: int32 [N, W]; None without.

        They are read from `shards`, unless they were given.
        """
        counts_rows = self.expected is not None and self.expected.counts_rows
        return drawn_rows(self.run, self.shards)[1] if counts_rows else None

    def init(self) -> Tree:
        """Return the initial params of the worker's workload: nested dicts of float32 arrays."""

        def ask(session: WorkerSession) -> Tree:
            if session.arrays is None:
                return by_packs().initial(session)
            session.process.call("init", {})
            if not np.isfinite(session.arrays.params).all():
                raise self._error("init", "a param is not finite", "finite params")
            return session.description.tree(session.arrays.params)

        return self.ask(ask)

    def gradient(self, params: Tree, rows_NW: np.ndarray, seed: int) -> tuple[float, Tree]:
        """Return the workload's mean loss of some rows, and its gradient, from the worker.

        Args:
          params: Nested dicts of float32 arrays.
          rows_NW: int32, a row at least.
          seed: Of all randomness in it.
        """

        def ask(session: WorkerSession) -> tuple[float, Tree]:
            request = _put(session, params, rows_NW) | {"seed": seed}
            loss = session.process.result("loss", "gradient", request).loss
            loss = math.nan if loss is None else loss
            return loss, session.description.tree(session.arrays.gradients)

        return self.ask(ask)

    def measure(self, params: Tree, rows_NW: np.ndarray) -> np.ndarray:
        """Return the workload's loss of each row: float32 [N]; NaN where it is no finite number."""
        return self.measure_and_count(params, rows_NW)[0]

    def measure_and_count(
        self, params: Tree, rows_NW: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the workload's loss of each row, and what counts in it; None if all alike.

        The worker measures a micro-batch at a time.
        """
        losses, counts = [], []

        def ask(session: WorkerSession, rows_BW: np.ndarray) -> None:
            self._count_statistics(session, params)
            request = _put(session, params, rows_BW)
            answer = session.process.result("losses", "measure", request)
            lengths = {len(answer.losses), len(answer.counts or answer.losses)}
            if lengths != {len(rows_BW)}:
                what = f"losses {_short(answer.losses)}, counts {_short(answer.counts)}"
                raise self._error("measure", what, f"{len(rows_BW)} of each")
            losses.extend(answer.losses)
            counts.extend(answer.counts)

        size = self.run.peers.micro_batch
        for first in range(0, len(rows_NW), size):
            self.ask(partial(ask, rows_BW=rows_NW[first : first + size]))
        if counts and len(counts) != len(losses):
            raise self._error("measure", f"counts = {_short(counts)}", "a number for each row")
        return np.array(losses, np.float32), np.array(counts) if counts else None

    def evaluate(self, params: Tree, split: str) -> Metrics:
        """Return the own metrics of the worker's workload at these params, on a split."""

        def ask(session: WorkerSession) -> Metrics:
            if session.arrays is None:
                return by_packs().evaluated(session, params, split)
            self._count_statistics(session, params)
            _put_params(session, params)
            answer = session.process.result("metrics", "evaluate_params", {"split": split})
            return answer.metrics

        return self.ask(ask)

    def dataset(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the data of the worker's workload: arrays [N, ...] by split and name."""
        return self.ask(
            lambda session: {s: self._arrays_of(session, s) for s in ("train", "held_out")}
        )

    def statistics(self, params: Tree) -> dict[str, np.ndarray]:
        """Return the workload's statistics of batch norms at these params, by name; {} without."""
        return self.ask(lambda session: self._count_statistics(session, params))

    def save(self, params: Tree, folder: Path) -> None:
        """Have the worker's workload write its model, at these params, into an empty folder."""

        def ask(session: WorkerSession) -> None:
            self._count_statistics(session, params)
            _put_params(session, params)
            session.process.call("save_params", {"path": str(folder.absolute())})

        self.ask(ask)

    def close(self) -> None:
        """Close the workload's worker: end its process.

        Raises:
          LockstepError: It changed files that are not its own, or imported what is not in its hash.
        """
        with self._lock:
            session = self._session
            try:
                if session and sys.exc_info()[0] is None:
                    self._check_imports(session.process)
            finally:
                self._end()
        facts, self._facts = self._facts, None
        if facts and sys.exc_info()[0] is None:  # else something worse is under way
            now = self._facts_of_files()
            changed = sorted(path for path in facts | now if facts.get(path) != now.get(path))
            if changed:
                what = f"{changed[0]} changed while it ran"
                raise self._error("close", what, "it to write in its own folder only")

    # ---- Its process ----

    def ask(self, ask: Callable[[WorkerSession], Reply]) -> Reply:
        """Ask the worker's process, which is started if there is none, and ended if it fails."""
        with self._lock:
            if self._session is None:
                self._session = self._begin()
            try:
                try:
                    return ask(self._session)
                except WorkerDiedError as error:  # it remembers nothing, so a new one answers too
                    log.warning(f"{self._keep_log(error)}; a new process is asked once more")
                    self._end()
                    self._session = self._begin()
                    return ask(self._session)
            except WorkerError as error:
                self._end()
                raise type(error)(self._keep_log(error)) from error
            except LockstepError as error:  # of a file that it left
                self._end()
                raise WorkerError(f"{self.name}: {error}") from error
            except BaseException:
                self._end()
                raise

    def _keep_log(self, error: WorkerError) -> str:
        """Keep the log of a worker that failed, and return the error with the place of the copy."""
        text = str(error)
        if self._folder is None or (log_file := f"{self._folder.name}/{LOG}") not in text:
            return text
        data, temporary = self.shards.parent, Path(tempfile.gettempdir()) / f"lockstep-{LOG}"
        copy = data / "logs" / LOG if data.is_dir() else temporary
        with suppress(OSError):
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(log_file, copy)
        return text.replace(log_file, str(copy))

    def _facts_of_files(self) -> dict[Path, tuple]:
        """Return size, time and inode of the worker's code, and of what the run begins with."""
        # before a run begins, stage convert may be making its result beside another stage
        init = self.shards.parent / Path(OUT["convert"]).name
        initial = walk(init) if self.expected and init.is_dir() else ()
        facts = {}
        for path in (*files_of(self.run).values(), *(path for _, path in initial)):
            with suppress(FileNotFoundError):
                status = path.stat(follow_symlinks=False)
                facts[path] = status.st_size, status.st_mtime_ns, status.st_ino
        return facts

    def _check_imports(self, process: WorkerProcess) -> None:
        """Check that all that the worker imported from workloads/ is in its code's hash."""
        if not process.hello.files:  # burn_p2p's worker does not say
            return
        try:
            files = [Path(file).resolve() for file in process.greet().files]
        except WorkerError:  # it has ended: whoever still needs it will be told
            return
        hashed = {file.resolve() for file in files_of(self.run).values()}
        source = SOURCE.resolve()
        if extra := [file for file in files if file.is_relative_to(source) and file not in hashed]:
            raise self._error(
                "hello",
                f"the worker imported {extra[0].name} without an import statement",
                "`import NAME` in its file: otherwise the run's hash does not cover that code",
            )

    def _begin(self) -> WorkerSession:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lockstep-worker-")
        folder = Path(self._folder.name)
        if self._facts is None:
            self._facts = self._facts_of_files()
        process, self._counted = WorkerProcess.start(_command(self.run), folder), (b"", {})
        try:
            self._check_able(process)
            device = process.result("runtime_device", "capability_probe", {}).runtime_device
            asked = {"state_dict_filter": self.patterns, "seed": workload_of(self.run).seed}
            arrays: SharedArrays | None = None
            if GRADIENT in process.hello.capabilities:
                description = self._described(process, asked)
                arrays = SharedArrays(folder, description.parameters)
                _share(process, arrays)
            else:
                description = self._planned(process, device, asked)
            self._check_imports(process)
        except BaseException:
            process.close()
            raise
        return WorkerSession(process, description, device, arrays, asked)

    def _count_statistics(self, session: WorkerSession, params: Tree) -> dict[str, np.ndarray]:
        """Have the worker compute statistics of batch norms, unless they stand at these params.

        The seed draws their rows: whoever has the params and these rows gets the same statistics.
        """
        if (rows_NW := self.rows_to_count) is None:
            return {}
        _put_params(session, params)
        digest = hashlib.sha256(session.arrays.params).digest()
        if digest != self._counted[0]:
            request = _put(session, params, rows_NW)
            answer = session.process.result("values", "statistics", request)
            self._counted = digest, answer.values
        return self._counted[1]

    def _check_able(self, process: WorkerProcess) -> None:
        """Check that the worker can do what the run asks of its workload."""
        needed, capabilities = NEEDED.get(workload_of(self.run).inner), process.hello.capabilities
        if self.for_training and needed and needed not in capabilities:
            text = f"{needed} among them with workload.inner = {workload_of(self.run).inner}"
            raise self._error("hello", f"capabilities {', '.join(sorted(capabilities))}", text)

    def _described(self, process: WorkerProcess, asked: dict[str, Any]) -> Description:
        """Return our own worker's description of its model."""
        request = {
            "rows": self.rows | self._place(),
            "micro_batch": self.run.peers.micro_batch,
            "threads": self.run.peers.threads,
        }
        answer = process.call("begin", request | asked)
        answer.pop("parameter_count", None)  # of the tensors
        description = self._checked(answer, "begin")
        self._check_patterns(description)
        return description

    def _place(self) -> dict[str, str]:
        """Return where the worker finds rows that are files; a transcript does not record it."""
        if self.rows["kind"] != "files":
            return {}
        return {"folder": str((self.shards / self.rows["folder"]).absolute())}

    def _planned(self, process: WorkerProcess, device: str, asked: dict[str, Any]) -> Description:
        """Return the description of a worker that computes no gradients, by its packs."""
        try:
            plan = by_packs().planned(process, device, code_hash(self.run), asked)
        except WorkerError:
            raise
        except LockstepError as error:
            raise WorkerError(f"{self.name}: {error}") from error
        return self._checked(plan, "parameter_pack_plan")

    def _checked(self, answer: dict, method: str) -> Description:
        """A worker's description that fits what the run began with."""
        identity = {"factory": workload_of(self.run).factory, "code": code_hash(self.run)}
        description = validate(
            Description, answer | identity, f"{self.name}: {method}", WorkerError
        )
        for name in Description.model_fields if self.expected else ():
            actual, expected = getattr(description, name), getattr(self.expected, name)
            if actual != expected:
                text = f"{_short(expected)} as the run began with"
                raise self._error(method, f"{name} is {_short(actual)}", text)
        return description

    def _check_patterns(self, description: Description) -> None:
        """Check that each pattern fits a tensor of the worker's model, lest a typo trains more."""
        floats = (tensor.name for tensor in (*description.tensors, *description.frozen))
        names = sorted({*floats, *description.integers, *description.tied})
        for key in ("include", "exclude"):
            for pattern in getattr(workload_of(self.run), key):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise LockstepError(
                        f"workload.{key} has {pattern!r}, expected a pattern that fits a tensor, "
                        f"as {', '.join(names[:8])}"
                    )

    def _end(self) -> None:
        session, self._session = self._session, None
        if session:
            with suppress(WorkerError):
                session.process.close()

    def _arrays_of(self, session: WorkerSession, split: str) -> dict[str, np.ndarray]:
        folder = session.process.folder / f"dataset-{split}"
        request, arrays = {"split": split, "path": str(folder)}, {}
        for spec in session.process.result("arrays", "dataset", request).arrays:
            file = folder / f"{spec.name}.npy"
            check_file(file, folder)
            with expecting(f"{self.name}: dataset: {file.name}", *A_FILE_OF_ARRAYS):
                arrays[spec.name] = np.lib.format.open_memmap(file, mode="r")
        return arrays

    def _error(self, method: str, actual: str, expected: str) -> LockstepError:
        return WorkerError(f"{self.name}: {method}: {actual}, expected {expected}")


class OffersPacks(Protocol):
    """What a part offers: workers that compute no gradients."""

    def planned(
        self, process: WorkerProcess, device: str, code: str, asked: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what a worker that computes no gradients says of its model."""

    def initial(self, session: "WorkerSession") -> Tree:
        """Return the first params of a worker that computes no gradients."""

    def evaluated(self, session: "WorkerSession", params: Tree, split: str) -> Metrics:
        """Return what a worker that computes no gradients measures of params."""


class OffersInnerLoops(Protocol):
    """What a part offers: workloads that take local steps of their own."""

    def take(
        self, worker: "Worker", session: "WorkerSession", job: Any
    ) -> tuple[Tree, float, np.ndarray]:
        """Return where a workload's steps of a job led to, their loss, and its state."""


PACKS, INNER_LOOPS = Joint[OffersPacks]("packs"), Joint[OffersInnerLoops]("inner_loop")


def by_packs() -> OffersPacks:
    """Return what a part offers for workers that compute no gradients."""
    return _of_burn_p2p(PACKS, "the capability gradient of the worker")


def inner_loops() -> OffersInnerLoops:
    """Return what a part offers for workloads that take local steps of their own."""
    return _of_burn_p2p(INNER_LOOPS, 'workload.inner = "gradient"')


def _of_burn_p2p(joint: Joint[Offered], otherwise: str) -> Offered:
    if not joint.parts():
        raise LockstepError(f"parts/burn_p2p: not here, expected it or {otherwise}")
    return next(iter(joint))


def drawn_rows(run: runfile.Run, shards: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows over which statistics of batch norms are computed: indices, int32 [N, W].

    They are of whole micro-batches, since a batch norm needs two rows.
    """
    length = run.llm.max_seq_len
    data = Sequences(shards, read_shards(shards), "train", length, run.runtime)
    size = run.peers.micro_batch
    count = min(COUNTED_ROWS, len(data)) // size * size or len(data)
    digest = hashlib.sha256(f"rows to count of seed {workload_of(run).seed}".encode()).digest()
    indices_N = np.sort(permute(digest, np.arange(count), len(data)))
    return indices_N, data.take(indices_N)


def _command(run: runfile.Run) -> WorkerCommand:
    runtime, workload = runtime_of(run), workload_of(run)
    return WorkerCommand(
        python=runtime.worker_python or sys.executable,
        module=runtime.worker_module,
        factory=workload.factory,
        config=workload.config,
        path=(SOURCE, *(Path(folder).expanduser() for folder in runtime.worker_path)),
        env=dict.fromkeys(THREADS, str(run.peers.threads)) | runtime.worker_env,
        start_seconds=runtime.worker_start_seconds,
        answer_seconds=runtime.answer_seconds,
    )


def _share(process: WorkerProcess, arrays: SharedArrays) -> None:
    """Have the worker map the shared file, whose name nobody needs from then on."""
    try:
        process.call("open_arrays", arrays.request())
    finally:
        arrays.forget()


def _put(session: WorkerSession, params: Tree, rows_NW: np.ndarray) -> dict[str, int]:
    """Copy params and rows to where the worker reads them, and return how many rows these are."""
    count, width = rows_NW.shape
    if session.arrays.rows.size < count * width:  # another file, so before anything is written
        session.arrays.make_room(count * width)
        _share(session.process, session.arrays)
    session.arrays.rows[: count * width] = rows_NW.reshape(-1)
    _put_params(session, params)
    return {"rows": count, "width": width}


def _put_params(session: WorkerSession, params: Tree) -> None:
    offset, flat = 0, session.arrays.params
    for leaf in session.description.leaves(params):
        array = np.asarray(leaf)
        flat[offset : offset + array.size] = array.reshape(-1)
        offset += array.size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
