"""Scores of tasks, repeated on the published weights where the reader asks for it."""

import math
from pathlib import Path

import jax

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.programs.placement import device_groups
from parts.publication.checks.claims import PublicClaim
from parts.publication.checks.results import Evaluated
from parts.publication.layout import EVALUATED
from parts.tasks import next_line, task_model
from parts.tasks.run_file_tasks import RunFileTasks
from pipeline import runfile, scores
from pipeline.weights import exported

TOLERANCE = 0.01  # of another machine: a document in a hundred may be answered otherwise


def check(
    folder: Path,
    run: runfile.Run,
    evaluated: Evaluated,
    shards: Path | None,
    store: Path,
) -> list[PublicClaim]:
    """Score the tasks of a published run again; claim nothing where it has no scores.

    The held-out text of the task next_line is that of `shards`, the reader's own. Tasks of lm_eval
    are lm_eval's own alone, and their data are kept in `store`: a stranger's definitions are not
    read, and no code of theirs is run.

    Raises:
      LockstepError: A score is another, or a task cannot be repeated.
    """
    said = {name: found for name, found in evaluated.tasks.items() if found is not None}
    if not said:
        return []
    for name in run.evaluate.tasks:
        if not name.replace("-", "_").isidentifier():
            raise RequestError(
                f"--tasks: {brief(repr(name))} is the author's file, expected names of tasks alone"
            )
    if next_line.NAME in said and shards is None:
        raise RequestError(
            f"--tasks: {next_line.NAME} asks of the held-out text, which is not published; "
            "expected it by --shards, from `lockstep download` with proof/run.json's data"
        )
    settings = run.evaluate.model_copy(update={"trust_task_code": False})
    own = run.model_copy(update={"evaluate": settings})
    model = exported.read(folder, scan=run.peers.scan_layers)
    params_on = {
        group: group.put(model.params) for group in device_groups(jax.devices(), run.peers.fsdp)
    }
    asked = task_model.of_folder(model, folder, params_on, settings.batch_size)
    tasks = RunFileTasks(own, settings, asked, shards or Path(), store, [])
    found = {task.name: scores.flat(task) for task in tasks.score(asked)}
    _compare(said, found)
    names = " and ".join(map(brief, sorted(said)))
    return [PublicClaim("tasks", "proven", f"the scores of {names} repeated", {"scores": found})]


def _compare(
    said: dict[str, dict[str, float | None]], found: dict[str, dict[str, float | None]]
) -> None:
    for task in sorted(said.keys() | found.keys()):
        if said.get(task, {}).keys() != found.get(task, {}).keys():
            here, there = (sorted(of.get(task, {})) for of in (found, said))
            raise LockstepError(
                f"{EVALUATED}: scores {brief(str(there))} of {brief(task)}, expected {here}"
            )
        for metric, value in found[task].items():
            claimed = said[task][metric]
            if value == claimed:
                continue
            if (
                value is None
                or claimed is None
                or not math.isclose(value, claimed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            ):
                raise LockstepError(
                    f"{EVALUATED}: {brief(metric)} of {brief(task)} is {claimed}, expected "
                    f"{value} as scored here"
                )
