"""What a run trains: a model of `models/`, or the user's own workload.

A run's `model` is a table that says which: a config.json or, of a workload, what it said of itself
(`workload`) and what a row of the data is (`rows`).
"""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.methods.build import Setting, aggregate_of, build, learning_rate_of_run
from lockstep.programs.train_step import Programs
from lockstep.tables.explain import validate_json
from parts.workload.description import FILE, code_hash, of_model
from parts.workload.inner_loop_programs import InnerLoopPrograms
from parts.workload.programs import WorkloadPrograms, WorkloadTask
from parts.workload.worker import RowSpec, Worker
from pipeline import runfile
from pipeline.language_model import language_model
from pipeline.tokens.rows import FILES, ArrayRows, FileRows, TokenRows
from pipeline.tokens.shards import PLAIN, Column, Shards
from pipeline.weights import hf

KINDS = {"tokens": TokenRows, "arrays": ArrayRows, "files": FileRows}  # of rows


def read_model(run: runfile.Run, init: Path, listed: Shards) -> dict[str, Any]:
    """Return a run's model, from what stages convert and download left."""
    if not run.workload.factory:
        return read_json(init / "hf" / hf.CONFIG)
    return {"workload": read_json(init / FILE), "rows": row_spec(run, listed)}


def row_spec(run: runfile.Run, listed: Shards) -> RowSpec:
    """Return what a row of the data is, as a worker is told."""
    if listed.rows is not None:
        return listed.rows.model_dump(mode="json")
    return {"kind": "tokens", "columns": [*listed.columns], "length": run.llm.max_seq_len}


def vocab_size(model: dict[str, Any]) -> int | None:
    """Return the bound of the token ids in a run's data, or None for a workload's, without one."""
    return None if "workload" in model else model["vocab_size"]


def check_model(run: runfile.Run, model: dict[str, Any], where: object) -> None:
    """Check that a run's model is known here; errors call it `where`.

    Raises:
      LockstepError: It is no model of `models/`, or the code of its workload is another here.
    """
    if not run.workload.factory:
        hf.model_of(model, where)
        return
    told = of_model(model, where)
    _check_rows(run, model.get("rows"), where)
    if (here := code_hash(run)) != told.code:
        raise LockstepError(
            f"{where}: workload {told.factory}, code and settings of hash {told.code[:12]}, "
            f"expected {here[:12]} as of workloads/ and [workload] here; nothing was audited: with "
            "other code every honest peer would seem to lie"
        )


def _check_rows(run: runfile.Run, rows: Any, where: object) -> None:
    """Check what a stranger says that a row is: a worker is told it, and could be led anywhere."""
    kind = rows.get("kind") if isinstance(rows, dict) else None
    if kind not in KINDS:
        raise LockstepError(f"{where}: rows of kind {kind!r}, expected one of {[*KINDS]}")
    found = validate_json(KINDS[kind], json.dumps(rows), f"{where}: rows")
    words = run.llm.max_seq_len * (len(found.columns) if isinstance(found, TokenRows) else 1)
    if found.words != words or (isinstance(found, FileRows) and found.folder != FILES):
        raise LockstepError(
            f"{where}: rows of {found.words} words ({kind}), expected {words} as "
            f"model.LLM.max_seq_len has them, and of files the folder {FILES}"
        )


def programs_of(
    run: runfile.Run,
    model: dict[str, Any],
    first_step: int = 0,
    columns: tuple[Column, ...] = PLAIN,
) -> Programs:
    """Return a run's programs.

    Args:
      run: The whole run.
      model: Its model.
      first_step: Rounds trained by the run that this one extends, 0 for a new run.
      columns: Columns of the data's rows.

    Raises:
      LockstepError: The run asks for what this model or this data does not support.
    """
    if not run.workload.factory:
        return language_model.programs_of(run, model, first_step, columns)
    told = of_model(model, FILE)
    groups = {tensor.name.split(".")[0] for tensor in told.tensors}
    learning_rate = learning_rate_of_run(run, first_step)
    setting = Setting(learning_rate, run.peers.overlap, (), aggregate_of(run.peers))
    optimizer = build(run.llm.optimizer, setting, groups)
    worker = Worker(run, model["rows"], told)
    task, seed, wire = WorkloadTask(told, columns), run.peers.seed, run.peers.wire
    if run.workload.inner == "gradient":
        return WorkloadPrograms(task, optimizer, worker, seed, wire, run.rows_of_a_step)
    return InnerLoopPrograms(task, optimizer, worker, seed, wire, setting.learning_rate)
