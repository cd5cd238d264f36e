"""The scores of tasks: numbers with their intervals, beside chance.

95 % of such intervals contain the true value. For a share p of n documents it is Wilson's score
interval, which stays within 0 and 1 and holds for small n:

  (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n),  z = 1.96

Where documents are alike in clusters, its standard error s is larger than that of n independent
ones, and n is the number that would have it: 1 + p (1 - p)/s² (Korn and Graubard, Survey
Methodology 24, 1998).
For any other number with a standard error s it is the number ± z s.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.errors import shown

Z = 1.959964  # 97.5 % of a normal distribution lie below it
SHARES = ("acc", "exact_match")  # metrics whose names begin so are shares of documents


class Metric(NamedTuple):
    """One number of a task's scores, and its standard error over documents, if known."""

    value: float
    stderr: float | None


class TaskResult(NamedTuple):
    """The result of one task: its scores."""

    name: str  # as the run file has it; of a YAML file, the task's own
    metrics: dict[str, Metric]  # such as acc; the first is the task's main one
    chance: float | None  # the mean of 1 / (number of choices); None if it is no choice
    documents: int
    few_shot: int  # solved examples before each document
    sha256: str  # of the task's definition and documents
    source: str


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a score that is a share of `count` independent documents."""
    centre = share + Z**2 / (2 * count)
    half = Z * (share * (1 - share) / count + Z**2 / (4 * count**2)) ** 0.5
    scale = 1 + Z**2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def interval(result: TaskResult, metric: str) -> tuple[float, float] | None:
    """Return the 95 % interval of a task's metric, or None if its error is unknown."""
    value, stderr = result.metrics[metric]
    if metric.startswith(SHARES) and 0 <= value <= 1:
        count = 1 + value * (1 - value) / stderr**2 if stderr else math.inf
        return wilson(value, min(count, result.documents))
    return None if stderr is None else (value - Z * stderr, value + Z * stderr)


def report(result: TaskResult) -> dict[str, Any]:
    """Return a task's result as evaluate.json has it: each metric with its interval."""
    metrics = {
        name: {"value": metric.value, "stderr": metric.stderr, "interval": interval(result, name)}
        for name, metric in result.metrics.items()
    }
    return result._asdict() | {"metrics": metrics}


def flat(result: TaskResult) -> dict[str, float | None]:
    """Return a task's result as metrics/evaluate.json has it: acc, acc_stderr and so on."""
    values: dict[str, float | None] = {}
    for name, metric in result.metrics.items():
        values |= {name: metric.value, f"{name}_stderr": metric.stderr}
    return values


def one_line(result: TaskResult) -> str:
    """Return a task's result as a line of text."""
    parts = []
    for score in scores([report(result)]):
        around = f" ({score.around})" if score.interval else ""
        parts.append(f"{score.metric} {score.value:.3f}{around}")
    chance = "" if result.chance is None else f"; chance {result.chance:.3f}"
    return f"{shown(result.name)}, {result.documents} documents: {', '.join(parts)}{chance}"


# ---- Scores as people read them, from evaluate.json ----


class Score(NamedTuple):
    """One metric of one task, with the 95 % interval, or None if it is unknown.

    `chance` is what a guess gives, or None if the metric is no share of right answers; other fields
    are those of `TaskResult`.
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
        """The score's interval as text."""
        return "unknown" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)

    @property
    def text(self) -> str:
        """The score with its interval, beside chance."""
        chance = "" if self.chance is None else f", chance {self.chance:.3g}"
        return f"{self.value:.3f} ({self.around}{chance})"

    @property
    def stands(self) -> str:
        """Whether the score's interval lies above chance, below it or around it."""
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
            *(task[key] for key in ("documents", "few_shot", "sha256", "source")),
        )
        for task in tasks
        for name, metric in task["metrics"].items()
    ]


def main_scores(tasks: Sequence[dict[str, Any]]) -> list[Score]:
    """Return each task's main score, its first."""
    return [scores([task])[0] for task in tasks]
