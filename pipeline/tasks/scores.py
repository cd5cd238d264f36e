"""What a task found: its numbers, with the interval that each is known to, and beside chance.

95 % of such intervals contain the true value. Of a share p of n documents it is Wilson's score
interval, which stays within 0 and 1 and holds for small n:

  (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n),  z = 1.96

Of any other number with a standard error s it is the number ± z s.
"""

from typing import Any, NamedTuple

from pipeline.errors import shown

Z = 1.959964  # 97.5 % of a normal distribution lie below it
SHARES = ("acc", "exact_match")  # metrics whose names begin so are shares of documents


class Metric(NamedTuple):
    """One number of a task.

    Attributes:
      value: The number.
      stderr: Its standard error over documents, or None where there is none.
    """

    value: float
    stderr: float | None


class TaskResult(NamedTuple):
    """The result of one task.

    Attributes:
      name: Name of the task as the run file has it; of a YAML file, the task's own.
      metrics: Numbers by name, such as acc; the first is the task's main one.
      chance: Accuracy of a guess, the mean of 1 / (number of choices); None if it is no choice.
      documents: Number of documents.
      few_shot: Number of solved examples before each document.
      sha256: Hash of the task's definition and documents.
      source: Where the task comes from.
    """

    name: str
    metrics: dict[str, Metric]
    chance: float | None
    documents: int
    few_shot: int
    sha256: str
    source: str


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` documents."""
    centre = share + Z**2 / (2 * count)
    half = Z * (share * (1 - share) / count + Z**2 / (4 * count**2)) ** 0.5
    scale = 1 + Z**2 / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def interval(result: TaskResult, metric: str) -> tuple[float, float] | None:
    """Return the 95 % interval of a result's metric, or None if its error is unknown."""
    value, stderr = result.metrics[metric]
    if metric.startswith(SHARES) and 0 <= value <= 1:
        return wilson(value, result.documents)
    return None if stderr is None else (value - Z * stderr, value + Z * stderr)


def report(result: TaskResult) -> dict[str, Any]:
    """Return a result as evaluate.json has it: each metric with its interval."""
    metrics = {
        name: {"value": metric.value, "stderr": metric.stderr, "interval": interval(result, name)}
        for name, metric in result.metrics.items()
    }
    return result._asdict() | {"metrics": metrics}


def flat(result: TaskResult) -> dict[str, float | None]:
    """Return a result as metrics/evaluate.json has it: acc, acc_stderr and so on."""
    values: dict[str, float | None] = {}
    for name, metric in result.metrics.items():
        values |= {name: metric.value, f"{name}_stderr": metric.stderr}
    return values


def one_line(result: TaskResult) -> str:
    """Return a result as a line of text."""
    said = []
    for name, metric in result.metrics.items():
        between = interval(result, name)
        around = f" ({between[0]:.3f} to {between[1]:.3f})" if between else ""
        said.append(f"{name} {metric.value:.3f}{around}")
    chance = "" if result.chance is None else f"; chance {result.chance:.3f}"
    return f"{shown(result.name)}, {result.documents} documents: {', '.join(said)}{chance}"
