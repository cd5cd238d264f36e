"""What tasks add to the table of `lockstep check`: lm_eval where a task needs it, and the names."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import brief
from parts.tasks.next_line import NAME
from pipeline import extras
from pipeline.preflight.row import CheckRow, Inspection, Mark, Need
from pipeline.runfile import Run

NAMES_WIDTH = 160  # characters of the names in the table


def _others(names: Iterable[str]) -> list[str]:
    """The tasks of lm_eval to look at before a run."""
    return [name for name in names if name != NAME]


def _for_scores_in_training(run: Run) -> Iterator[str]:
    if run.evaluate.every and _others(run.evaluate.sample_tasks):
        yield "lm_eval"


def _for_scores(run: Run) -> Iterator[str]:
    if _others(run.evaluate.tasks):
        yield "lm_eval"


def _names(run: Run, shards: Path | None) -> Iterator[CheckRow]:
    others = _others(run.evaluate.tasks)
    if others and extras.is_installed("lm_eval"):  # without it, that is a row of its own
        from parts.tasks import lm_eval_tasks

        lm_eval_tasks.check_known(others, trusted=run.evaluate.trust_task_code)
        text = f"{', '.join(others)}; their data are looked at in stage evaluate"
        yield CheckRow(Mark.FINE, "tasks", brief(text, NAMES_WIDTH))


NEEDS = (
    Need("train", "[evaluate] sample_tasks", _for_scores_in_training),
    Need("evaluate", "[evaluate] tasks", _for_scores),
)
LOOKS = (Inspection("tasks", "evaluate", _names),)
