"""A task's result in numbers: with the interval that it is known to, and beside chance.

95 % of such intervals contain the true value. Of a share p of n documents it is Wilson's score
interval, which stays within 0 and 1 and holds for small n:

  (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n),  z = 1.96

Of any other number with a standard error s it is the number ± z s.
"""

from typing import Any

from pipeline.tasks.result import TaskResult

Z = 1.959964  # 97.5 % of a normal distribution lie below it
SHARES = ("acc", "exact_match")  # metrics whose names begin so are shares of documents


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
    return f"{result.name}, {result.documents} documents: {', '.join(said)}{chance}"
