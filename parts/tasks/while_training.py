"""Scores of tasks while a model trains: `[evaluate] every`.

They are computed beside the training, on a copy of its params, and written to a file that a kill
does not lose; nothing of the training depends on them.
"""

import csv
import io
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from lockstep.files import write_text
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from parts.tasks import task_model
from parts.tasks.run_file_tasks import RunFileTasks
from pipeline import runfile
from pipeline.scores import TaskResult, interval, one_line
from pipeline.stage.artifacts import Paths
from pipeline.tokens.tokenizer_files import TOKENIZER, load_tokenizer
from pipeline.weights import exported, hf, model_folder

FILE = "tasks.tsv"
COLUMNS = ("step", "task", "metric", "value", "low", "high")
log = logging.getLogger(__name__)


class TrainingScores:
    """The scores of a training, one row for each metric of each task at each scored round.

    Args:
      path: File of the scores so far, which this keeps complete.
      score: Returns the results of the tasks at some params.
      every: Rounds between scores; 0: none.
      aside: Whether to score on a thread of its own, while training goes on.
    """

    def __init__(
        self,
        path: Path,
        score: Callable[[Tree], list[TaskResult]] = lambda _: [],
        every: int = 0,
        *,
        aside: bool = False,
    ):
        self.path, self._score, self.every = path, score, every
        self._thread = ThreadPoolExecutor(1) if aside else None
        self._pending: Future[None] | None = None
        self.rows: list[tuple[Any, ...]] = []

    def begin(self) -> None:
        """Forget scores of an earlier attempt."""
        self._keep([])

    def resume(self, step: int) -> None:
        """Read the scores up to the round after which the training goes on."""
        with open(self.path, encoding="utf-8", newline="") as file:
            _, *lines = csv.reader(file, delimiter="\t")
        rows = [(int(line[0]), line[1], line[2], float(line[3]), *line[4:]) for line in lines]
        self._keep([row for row in rows if row[0] <= step])

    def take(self, step: int, params: Callable[[], Tree], *, last: bool = False) -> None:
        """Score the params after a round, if it is one of those; on a thread, return at once.

        The last round is always scored. `params` returns a copy of the params.
        """
        if not self.every or (step % self.every and not last):
            return
        self.wait()
        if self._thread is None:
            self._take(step, params())
        else:
            self._pending = self._thread.submit(self._take, step, params())

    def wait(self) -> None:
        """Wait until all scores are written, as a checkpoint expects of earlier rounds."""
        if self._pending:
            self._pending.result()
        self._pending = None

    def close(self) -> None:
        """End the thread."""
        if self._thread:
            self._thread.shutdown()

    def _take(self, step: int, params: Tree) -> None:
        rows = []
        for result in self._score(params):
            log.info(f"train: round {step}: {one_line(result)}")
            for name, metric in result.metrics.items():
                ends = interval(result, name) or ("", "")
                rows.append((step, result.name, name, metric.value, *ends))
        self._keep([*self.rows, *rows])

    def _keep(self, rows: list[tuple[Any, ...]]) -> None:
        self.rows = rows
        text = io.StringIO()
        csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
        write_text(self.path, text.getvalue())


def of_run(run: runfile.Run, hf_config: dict[str, Any], paths: Paths) -> TrainingScores:
    """Return the scores of a run's training; without `[evaluate] every`, they stay empty.

    Tasks are as defined but for their number of documents, so the scores depend on `[evaluate]
    every`, `sample` and `sample_tasks` alone. They are computed on devices that no peer uses, if
    there are any. `hf_config` is the model's config.json, `paths` are those of the stage train.

    Raises:
      LockstepError: There is no tokenizer, or a task of lm_eval is not to be had.
    """
    path, chosen = paths.scratch / FILE, run.evaluate
    init, shards = paths.out("convert"), paths.out("download")
    if not chosen.every:
        return TrainingScores(path)
    groups = device_groups(jax.devices(), run.peers.fsdp)
    spare = groups[1 if run.peers.layout == "vmap" else run.peers.count :]
    aside = bool(spare) and run.runtime.carrier == "in_process"
    where = spare if aside else groups[:1]
    settings = runfile.Evaluate(
        tasks=chosen.sample_tasks,
        trust_task_code=chosen.trust_task_code,
        questions=chosen.sample,
        limit=chosen.sample,
    )
    own, given = init / "hf", shards / "tokenizer"
    folder = given if given.is_dir() else own  # the tokenizer's, as of the export
    untrained = _computing(run, hf_config, own / hf.CONFIG, folder / TOKENIZER)
    model = task_model.from_folder(untrained, folder, {}, settings.batch_size)
    notes: list[str] = []
    tasks = RunFileTasks(run, settings, model, shards, paths.store, notes)
    for note in notes:
        log.warning(f"train: {note}")

    def score(params: Tree) -> list[TaskResult]:
        placed = {group: group.put(params) for group in where}
        trained = untrained._replace(params=params)
        now = task_model.from_folder(trained, folder, placed, settings.batch_size)
        # the same program, which is compiled once
        return tasks.score(now._replace(score=model.score), quiet=True)

    return TrainingScores(path, score, chosen.every, aside=aside)


def _computing(
    run: runfile.Run, hf_config: dict[str, Any], where: Path, tokenizer: Path
) -> exported.Exported:
    """The model as its export will be, without params."""
    read = load_tokenizer(tokenizer) if tokenizer.exists() else None
    whole = model_folder.with_context(hf_config, run.llm.max_seq_len)
    return exported.computing(whole, {}, read, where, scan=run.peers.scan_layers)
