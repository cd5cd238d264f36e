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

from lockstep.files import write_text
from lockstep.optim.optimizer import Tree
from pipeline.scores import TaskResult, interval, one_line

FILE = "tasks.tsv"
SCORE_COLUMNS = ("step", "task", "metric", "value", "low", "high")
log = logging.getLogger(__name__)


class TrainingScores:
    """The scores of a training, one row for each metric of each task at each scored round.

    The file at `path` has all scores so far. `score` returns the results of the tasks at some
    params, every so many rounds, 0 for never; `aside` on a thread, while training goes on.
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
        """Forget the scores of tasks that an earlier attempt wrote."""
        self._keep([])

    def resume(self, step: int) -> None:
        """Read the scores of tasks up to the round after which the training goes on."""
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
        """End the thread that scores tasks while the run trains."""
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
        csv.writer(text, delimiter="\t", lineterminator="\n").writerows([SCORE_COLUMNS, *rows])
        write_text(self.path, text.getvalue())
