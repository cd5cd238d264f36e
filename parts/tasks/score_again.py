"""Scores of a published run's tasks, repeated on its weights; the joint "score_again"."""

from collections.abc import Collection
from pathlib import Path

import jax

from lockstep.errors import RequestError, brief
from lockstep.programs.placement import device_groups
from parts.tasks import next_line, task_model
from parts.tasks.run_file_tasks import RunFileTasks
from pipeline import runfile, scores
from pipeline.weights import exported


def score_again(
    run: runfile.Run, folder: Path, names: Collection[str], shards: Path | None, store: Path
) -> dict[str, dict[str, float | None]]:
    """Return scores by task, as evaluate.json has them.

    Tasks of lm_eval are lm_eval's own alone, and their data are kept in `store`: a stranger's
    definitions are not read, and no code of theirs is run.

    Args:
      run: The published run.
      folder: Its export.
      names: The tasks of which scores are published.
      shards: The reader's own data, whose held-out text next_line asks of; None without.
      store: Folder of downloads.

    Raises:
      RequestError: A task cannot be repeated here.
    """
    for name in run.evaluate.tasks:
        if not name.replace("-", "_").isidentifier():
            raise RequestError(
                f"--tasks: {brief(repr(name))} is the author's file, expected names of tasks alone"
            )
    if next_line.NAME in names and shards is None:
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
    asked = task_model.from_folder(model, folder, params_on, settings.batch_size)
    tasks = RunFileTasks(own, settings, asked, shards or Path(), store, [])
    return {task.name: scores.flat(task) for task in tasks.score(asked)}
