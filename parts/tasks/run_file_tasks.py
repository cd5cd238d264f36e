"""The tasks that a run file names, of this room and of lm_eval.

A joint: stage evaluate asks for `score_export`, `verify` for `score_again`.
"""

from collections.abc import Collection
from pathlib import Path

import jax

from lockstep.errors import RequestError, brief
from lockstep.machine.progress import Progress
from lockstep.programs.placement import device_groups
from parts.tasks import harness, next_line, next_line_task, task_model
from parts.tasks.task_model import TaskModel
from pipeline import runfile, scores
from pipeline.scores import TaskResult
from pipeline.stage.artifacts import Paths
from pipeline.weights import exported
from pipeline.weights.exported import Exported


def score_export(
    run: runfile.Run, exported: Exported, paths: Paths, folder: Path, path: str, notes: list[str]
) -> list[TaskResult]:
    """Return the results of `[evaluate] tasks`, as stage evaluate asks for them.

    Questions and answers are written to `folder`, which its files call `path`; `notes` gains the
    reason if a task has nothing to ask.
    """
    settings = run.evaluate
    if exported.tokenizer is None and settings.tasks == (next_line.NAME,):
        notes.append(f"there is no tokenizer.json, so {next_line.NAME} has no questions")
        return []
    groups = device_groups(jax.devices(), run.peers.fsdp)
    model = task_model.from_folder(exported, paths.out("export"), groups, settings.batch_size)
    tasks = RunFileTasks(run, settings, model, paths.out("download"), paths.store, notes)
    return tasks.score(model, folder, path)


def score_again(
    run: runfile.Run, folder: Path, names: Collection[str], shards: Path | None, store: Path
) -> dict[str, dict[str, float | None]]:
    """Return scores of the run file's tasks, as evaluate.json has them.

    Tasks of lm_eval are lm_eval's own alone, and their data are kept in `store`: a stranger's
    definitions are not read, and no code of theirs is run. `names` are the tasks whose scores are
    published; `shards` are the reader's own data, with the held-out text that next_line asks about.
    """
    for name in run.evaluate.tasks:
        if not name.replace("-", "_").isidentifier():
            raise RequestError(
                f"--tasks: {brief(repr(name))} is a file of the author's, expected only names of "
                "tasks"
            )
    if next_line.NAME in names and shards is None:
        raise RequestError(
            f"--tasks: {next_line.NAME} asks about the held-out text, which is not published; "
            "expected --shards, made by `lockstep download` with proof/run.json's data"
        )
    settings = run.evaluate.model_copy(update={"trust_task_code": False})
    own = run.model_copy(update={"evaluate": settings})
    groups = device_groups(jax.devices(), run.peers.fsdp)
    export = exported.read(folder, run.peers)
    model = task_model.from_folder(export, folder, groups, settings.batch_size)
    tasks = RunFileTasks(own, settings, model, shards or Path(), store, [])
    return {task.name: scores.flat(task) for task in tasks.score(model)}


class RunFileTasks:
    """The tasks of a run file, ready to score a model, once or many times.

    `settings` are the run's `[evaluate]`, or that with other tasks or fewer documents; `shards` is
    the folder that the stage download left; `notes` gains the reason if a task has nothing to ask.
    """

    def __init__(
        self,
        run: runfile.Run,
        settings: runfile.Evaluate,
        model: TaskModel,
        shards: Path,
        store: Path,
        notes: list[str],
    ):
        self.settings, self.store = settings, store
        # the pin is of the tasks of `[evaluate] tasks`, all of them
        self.pin = run.pins.tasks if settings == run.evaluate else ""
        self.others = [name for name in settings.tasks if name != next_line.NAME]
        self.selection = None
        if next_line.NAME in settings.tasks:
            count = settings.questions
            self.selection = next_line_task.prepare(run, shards, model, count, notes)

    def score(
        self, model: TaskModel, folder: Path | None = None, path: str = "", *, quiet: bool = False
    ) -> list[TaskResult]:
        """Return the results of the run file's tasks with the model's params.

        Questions and answers are written to `folder`, if anywhere, which its files call `path`.
        """
        results, others = [], []
        if self.others:  # first: one may be missing
            others = harness.run_tasks(
                self.others, model, self.settings, self.store, pin=self.pin, folder=folder
            )
        if self.selection:
            if quiet:
                result, scores = next_line_task.result(self.selection, model)
            else:
                with Progress(
                    "next_line", total=len(self.selection.requests), unit="request"
                ) as bar:
                    result, scores = next_line_task.result(self.selection, model, bar.advance)
            results.append(result)
            if folder:
                next_line_task.write(folder, path, self.selection, scores)
        return results + others
