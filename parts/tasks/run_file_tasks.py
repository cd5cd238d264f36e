"""The tasks that a run file names, of this room and of lm_eval; a joint of stage evaluate."""

from contextlib import ExitStack
from pathlib import Path

import jax

from lockstep.machine.progress import Progress
from lockstep.programs.placement import device_groups
from parts.tasks import harness, next_line, next_line_task, task_model
from parts.tasks.task_model import TaskModel
from pipeline import runfile
from pipeline.scores import TaskResult
from pipeline.stage.artifacts import Paths
from pipeline.weights.exported import Exported


def score_export(
    run: runfile.Run, exported: Exported, paths: Paths, folder: Path, named: str, notes: list[str]
) -> list[TaskResult]:
    """Return the results of `[evaluate] tasks`, as stage evaluate asks for them.

    Args:
      run: The whole run.
      exported: The exported model.
      paths: Paths of stage evaluate.
      folder: Where questions and answers are written.
      named: Path of that folder, as its files name it.
      notes: Gains the reason if a task has nothing to ask.

    Raises:
      LockstepError: A task cannot be run.
    """
    settings = run.evaluate
    if exported.tokenizer is None and settings.tasks == (next_line.NAME,):
        notes.append(f"there is no tokenizer.json, so {next_line.NAME} has no questions")
        return []
    groups = device_groups(jax.devices(), run.peers.fsdp)
    params_on = {group: group.put(exported.params) for group in groups}
    model = task_model.from_folder(exported, paths.out("export"), params_on, settings.batch_size)
    tasks = RunFileTasks(run, settings, model, paths.out("download"), paths.store, notes)
    return tasks.score(model, folder, named)


class RunFileTasks:
    """The tasks of a run file, ready to score a model, once or many times.

    Args:
      run: The whole run.
      settings: Its `[evaluate]`, or that with other tasks or fewer documents.
      model: The model.
      shards: Folder that the stage download left.
      store: The folder `data/store`.
      notes: Gains the reason if a task has nothing to ask.
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
        self.asked = None
        if next_line.NAME in settings.tasks:
            count = settings.questions
            self.asked = next_line_task.prepare(run, shards, model, count, notes)

    def score(
        self, model: TaskModel, folder: Path | None = None, named: str = "", *, quiet: bool = False
    ) -> list[TaskResult]:
        """Return the results of all tasks.

        Args:
          model: The model, with the params that are scored.
          folder: Where questions and answers are written, if anywhere.
          named: Path of that folder, as its files name it.
          quiet: Whether next_line shows no progress.

        Raises:
          LockstepError: A task of lm_eval cannot be run.
        """
        results, others = [], []
        if self.others:  # first: one may be missing
            others = harness.run_tasks(
                self.others, model, self.settings, self.store, pin=self.pin, folder=folder
            )
        if self.asked:
            with ExitStack() as stack:
                advance = None
                if not quiet:
                    bar = Progress("next_line", total=len(self.asked.requests), unit="request")
                    advance = stack.enter_context(bar).advance
                result, scores = next_line_task.result(self.asked, model, advance)
            results.append(result)
            if folder:
                next_line_task.write(folder, named, self.asked, scores)
        return results + others
