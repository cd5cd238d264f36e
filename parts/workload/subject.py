"""A workload as what a run trains: a model of the user's own, in a process of its own.

Its model in a header is `{"workload": what it said of itself, "rows": what a row of the data is}`.
"""

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file, write_json
from lockstep.optim.optimizer import Tree
from lockstep.programs.columns import PLAIN, Column
from lockstep.programs.local_training import HostSteps, Lots, one_by_one
from lockstep.programs.train_step import Programs
from lockstep.tables.validation import validate_json
from lockstep.transcript.trees import flatten, load_arrays, save_tree
from parts.workload import export_folder
from parts.workload.description import FILE, Description, code_hash, of_model
from parts.workload.export_folder import OpenedWorkload
from parts.workload.inner_steps import InnerSteps, with_state
from parts.workload.tables import DataFiles, workload_of
from parts.workload.worker import NO_ROWS, RowSpec, Worker, drawn_rows
from pipeline import runfile
from pipeline.runfile.method import learning_rate_of_run, optimizer_of_run
from pipeline.stage.artifacts import COUNTED, listing_sha256
from pipeline.tokens.rows import FILES, ArrayRows, FileRows, TokenRows
from pipeline.tokens.shards import Shards
from pipeline.weights.model_folder import TrainedModel

KINDS = {"tokens": TokenRows, "arrays": ArrayRows, "files": FileRows}  # of rows
HEADER = "the model"  # what errors call one that was checked before

log = logging.getLogger(__name__)


class WorkloadTask:
    """What a workload trains: its params' shapes; loss and gradient are the worker's."""

    def __init__(self, described: Description, columns: tuple[Column, ...] = PLAIN):
        self.described, self.columns = described, columns

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the params."""
        return self.described.shapes

    @property
    def imprecise(self) -> NoReturn:
        """The workload has no other precision: the run file's check refuses that fault."""
        raise LockstepError(
            f"workload {self.described.factory}: found the fault wrong_precision, expected none: "
            "a workload sets its own precision"
        )


class WorkloadBegins:
    """The params that a workload begins with; `pipeline.subject.Begins`."""

    def seed(self, run: runfile.Run) -> int:
        """Return the seed that the workload's generators begin with."""
        return workload_of(run).seed

    def first_params(self, run: runfile.Run, folder: Path) -> dict[str, Any]:
        """Write the params that the workload begins with, and what it says of itself."""
        with closing(Worker(run, NO_ROWS)) as worker:
            description, params = worker.describe(), worker.init()
        save_tree(folder / "params.safetensors", params)
        write_json(folder / FILE, description.model_dump(mode="json"))
        log.info(
            f"convert: workload {description.factory}, {description.parameters:,} parameters that "
            f"travel, code and settings of hash {description.code[:12]}"
        )
        hashes = {name: sha256_file(folder / name) for name in (FILE, "params.safetensors")}
        return {
            "factory": description.factory,
            "parameters": description.parameters,
            "seed": workload_of(run).seed,
            "files": hashes,
            "sha256": listing_sha256(hashes.items()),
        }

    def params_again(self, run: runfile.Run, model: dict[str, Any]) -> Tree:
        """Return the params that the workload begins with."""
        with closing(_worker(run, model)) as worker:
            return worker.init()


class WorkloadExports:
    """The folder of an exported workload; `pipeline.subject.Exports`."""

    model_file = FILE
    card = Path(__file__).with_name("workload_card.md.jinja")

    def export(self, run: runfile.Run, trained: TrainedModel, folder: Path) -> None:
        """Write the workload's params, its description, and what its method `save` writes."""
        with closing(_worker(run, trained.model)) as worker:
            worker.shards = trained.shards
            description = of_model(trained.model, HEADER)
            export_folder.write(folder, worker, description, trained.params, run.export.dtype)

    def export_weights(
        self, run: runfile.Run, model: dict[str, Any], params: Tree, folder: Path
    ) -> None:
        """Write the files of the workload's export that Lockstep writes itself."""
        values = {name.replace("/", "."): leaf for name, leaf in flatten(params).items()}
        description = of_model(model, HEADER)
        export_folder.write_params(folder, description, values.__getitem__, run.export.dtype)

    def exported_params(self, model: dict[str, Any], folder: Path) -> Tree:
        """Return the params of an exported workload."""
        return export_folder.read(folder, of_model(model, HEADER))

    def open_export(
        self, run: runfile.Run, model: dict[str, Any], folder: Path, shards: Path | None = None
    ) -> OpenedWorkload:
        """Return an exported workload's params, and a worker that measures them."""
        worker = _worker(run, model)
        worker.shards = shards or worker.shards
        if (path := folder / COUNTED).is_file():
            worker.rows_to_count = _given_rows(run, model, path)
        return OpenedWorkload(worker, self.exported_params(model, folder))


class WorkloadSubject:
    """A workload; a `pipeline.subject.Subject`."""

    checkpoints = "Ephemeral", "Run"
    begins, exports = WorkloadBegins(), WorkloadExports()
    described_in, any_rows = FILE, True
    loss_unit, has_perplexity = "as the workload has it", False
    draws = True
    memory_unknown = "a workload computes in a process of its own"

    def trains(self, run: runfile.Run) -> bool:
        """Return whether the run file has a table [workload] with a factory."""
        return bool(workload_of(run).factory)

    def check_public(self, run: runfile.Run, where: object) -> None:
        """Refuse a workload that nobody else could repeat: a command, or rows named by files."""
        if workload_of(run).inner == "command":
            raise LockstepError(
                f"{where}: workload.inner is 'command', expected 'gradient' or 'worker' to "
                "publish: nobody runs a stranger's command"
            )
        if isinstance(run.llm.data_location, DataFiles):
            raise LockstepError(
                f"{where}: {runfile.variant_name(run.llm.data_location)}: rows are names of files, "
                "which a publication does not hold; expected tokens or arrays to publish"
            )

    def describes(self, model: dict[str, Any]) -> bool:
        """Return whether a model in a header is a workload's."""
        return "workload" in model

    # ---- What it says of itself ----

    def read_model(self, run: runfile.Run, path: Path, listed: Shards | None) -> dict[str, Any]:
        """Return the workload's description of itself from stage convert, and that of a row."""
        return {"workload": read_json(path), "rows": rows_of(run, listed)}

    def check_model(self, run: runfile.Run, model: dict[str, Any], where: object) -> None:
        """Check that the workload's rows fit the run, and that its code here is what trained."""
        spec = of_model(model, where)
        _check_rows(run, model.get("rows"), where)
        if (code := code_hash(run)) != spec.code:
            raise LockstepError(
                f"{where}: workload {spec.factory} was trained with code and settings of hash "
                f"{spec.code[:12]}, expected {code[:12]}, the hash of workloads/ and [workload] "
                "here; nothing was audited, since with other code every honest peer would seem to "
                "lie"
            )

    def title(self, model: dict[str, Any]) -> str:
        """Return the name of the workload's factory."""
        return model["workload"]["factory"]

    def parameters(self, model: dict[str, Any]) -> int:
        """Return how many numbers of the workload travel."""
        return of_model(model, HEADER).parameters

    def vocab_size(self, model: dict[str, Any]) -> None:
        """Return None: only the workload's code knows what the words of a row mean."""

    def code(self, model: dict[str, Any]) -> str:
        """Return the hash of the workload's code and settings."""
        return model["workload"]["code"]

    def repeats(self, run: runfile.Run) -> bool:
        """Return what the table [workload] says of repeated steps."""
        return workload_of(run).repeats

    def computed_by(
        self, run: runfile.Run, model: dict[str, Any], environment: dict[str, str]
    ) -> str:
        """Return the workload's name, and its device."""
        device = environment.get("worker_device", "a device of its own")
        return f"workload {self.title(model)} computes on {device}"

    # ---- How it is trained ----

    def extend(self, run: runfile.Run, earlier: dict[str, Any], where: str, folder: Path) -> None:
        """Check that the workload has the tensors of the earlier run; write what it says.

        Its code and settings may differ, which a line reports.
        """
        old = of_model(earlier, where)
        with closing(Worker(run, NO_ROWS)) as worker:
            new = worker.describe()
        for name in Description.model_fields:
            if name not in ("code", "factory") and getattr(new, name) != getattr(old, name):
                raise LockstepError(
                    f"{where}: {name} of workload {old.factory} differs from that of "
                    f"{new.factory}, expected the same tensors, with the same values in those that "
                    "are not trained"
                )
        if new.code != old.code:
            log.warning(
                f"convert: warning: workload {new.factory} has code and settings of hash "
                f"{new.code[:12]}, and {where}, which this one extends, had {old.code[:12]}"
            )
        write_json(folder / FILE, new.model_dump(mode="json"))

    def programs(
        self,
        run: runfile.Run,
        model: dict[str, Any],
        first_step: int = 0,
        columns: tuple[Column, ...] = PLAIN,
    ) -> Programs:
        """Return the programs of a run that trains a workload, see `Subject.programs`."""
        description = of_model(model, FILE)
        groups = {tensor.name.split(".")[0] for tensor in description.tensors}
        learning_rate = learning_rate_of_run(run, first_step)
        optimizer = one_by_one(optimizer_of_run(run, groups, first_step=first_step))
        worker, seed = Worker(run, model["rows"], description), run.peers.seed
        task, wire, lot = WorkloadTask(description, columns), run.peers.wire, run.rows_of_a_step
        if workload_of(run).inner == "gradient":
            steps = HostSteps(optimizer, Lots(optimizer.inner_steps, lot), worker, seed)
            return Programs(task, optimizer, steps, wire=wire, lot=lot)
        inner = InnerSteps(optimizer, Lots(optimizer.inner_steps), worker, seed, learning_rate)
        return Programs(task, with_state(optimizer), inner, wire=wire)

    def row_weights(
        self, programs: Programs, params: Tree, rows_NW: np.ndarray
    ) -> np.ndarray | None:
        """Return what the workload's `loss` counts in each row, if it gives sums and counts."""
        worker = programs.steps.by
        counts_of_one = worker.measure_and_count(params, rows_NW[:1])[1]
        return None if counts_of_one is None else worker.measure_and_count(params, rows_NW)[1]

    def counted_rows(
        self, run: runfile.Run, model: dict[str, Any], shards: Path
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rows over which a workload's statistics of batch norms are computed."""
        if not of_model(model, HEADER).counts_rows:
            return None
        return drawn_rows(run, shards)


SUBJECT = WorkloadSubject()


def _worker(run: runfile.Run, model: dict[str, Any]) -> Worker:
    """Return a worker whose workload is as it trained."""
    return Worker(run, model["rows"], of_model(model, HEADER))


def rows_of(run: runfile.Run, listed: Shards | None) -> RowSpec:
    """Return a worker's description of a row of the data."""
    if listed is None:
        return NO_ROWS
    if listed.rows is not None:
        return listed.rows.model_dump(mode="json")
    return {"kind": "tokens", "columns": [*listed.columns], "length": run.llm.max_seq_len}


def _given_rows(run: runfile.Run, model: dict[str, Any], path: Path) -> np.ndarray:
    """Return a workload's rows that a stranger published: int32 [N, W]."""
    width = run.llm.max_seq_len * len(model["rows"].get("columns", PLAIN))
    rows_NW = load_arrays(path).get("rows", np.zeros(0))
    if rows_NW.dtype != np.int32 or rows_NW.shape != (len(rows_NW), width) or not rows_NW.size:
        raise LockstepError(f"{path}: expected rows of {width} numbers")
    return rows_NW


def _check_rows(run: runfile.Run, rows: Any, where: object) -> None:
    """Check a stranger's description of a row: a worker gets it, and could be led anywhere."""
    kind = rows.get("kind") if isinstance(rows, dict) else None
    if kind not in KINDS:
        raise LockstepError(f"{where}: rows of kind {kind!r}, expected one of {[*KINDS]}")
    spec = validate_json(KINDS[kind], json.dumps(rows), f"{where}: rows")
    words = run.llm.max_seq_len * (len(spec.columns) if isinstance(spec, TokenRows) else 1)
    if spec.words != words or (isinstance(spec, FileRows) and spec.folder != FILES):
        raise LockstepError(
            f"{where}: rows have {spec.words} words ({kind}), expected {words} as in "
            f"model.LLM.max_seq_len, and rows of kind files the folder {FILES}"
        )
