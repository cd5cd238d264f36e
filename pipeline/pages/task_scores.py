"""The scores of tasks as people read them."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Score(NamedTuple):
    """One metric of one task.

    Attributes:
      task: Name of the task.
      metric: Name of the metric.
      value: The number.
      interval: 95 % interval, or None if it is unknown.
      chance: What a guess gives, or None if the metric is no share of right answers.
      documents: Number of documents.
      few_shot: Number of solved examples before each.
      sha256: Hash of the task's documents.
      source: Where they come from.
    """

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    chance: float | None
    documents: int
    few_shot: int
    sha256: str
    source: str

    @property
    def around(self) -> str:
        """The interval as text."""
        return "unknown" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)

    @property
    def said(self) -> str:
        """The value with its interval, beside chance."""
        chance = "" if self.chance is None else f", chance {self.chance:.3g}"
        return f"{self.value:.3f} ({self.around}{chance})"

    @property
    def stands(self) -> str:
        """Where the interval lies beside chance: above it, below it or around it."""
        if self.chance is None or self.interval is None:
            return ""
        low, high = self.interval
        return "above" if low > self.chance else "below" if high < self.chance else "around"


def scores(tasks: Sequence[dict[str, Any]]) -> list[Score]:
    """Return the metrics of the tasks in evaluate.json, one after the other."""
    return [
        Score(
            task["name"],
            name,
            metric["value"],
            metric["interval"] and tuple(metric["interval"]),
            task["chance"] if name.startswith("acc") else None,
            task["documents"],
            task["few_shot"],
            task["sha256"],
            task["source"],
        )
        for task in tasks
        for name, metric in task["metrics"].items()
    ]


def main_scores(tasks: Sequence[dict[str, Any]]) -> list[Score]:
    """Return each task's main metric, its first."""
    return [scores([task])[0] for task in tasks]
