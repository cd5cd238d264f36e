"""The table of a comparison: what each method came to at equal tokens, bytes and hours."""

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.trainings import PlannedTraining, card_of_method, grid

Ended = Mapping[str, Any]


class Row(NamedTuple):
    """A method under a failure, at its best rate.

    Attributes:
      method: Its name.
      label: What people call it.
      failure: What went wrong, or `none`.
      local_steps: Its local steps of a round.
      rate: Its base learning rate.
      seeds: What came of its seeds, those that diverged included.
    """

    method: str
    label: str
    failure: str
    local_steps: int
    rate: float
    seeds: tuple[Ended, ...]

    @property
    def losses(self) -> list[float]:
        """Held-out losses of the seeds that did not diverge, nats per token."""
        return [seed["loss"] for seed in self.seeds if seed["loss"] is not None]

    @property
    def mean(self) -> float:
        """The mean of the losses; infinite if a seed diverged."""
        whole = len(self.losses) == len(self.seeds)
        return statistics.fmean(self.losses) if whole else math.inf

    @property
    def spread(self) -> float | None:
        """The standard deviation of the losses; None for fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    def total(self, column: str) -> float:
        """Return the last value of a column of the first seed's curve, such as bytes_up.

        NaN where each seed diverged.
        """
        curve = self.first("curve")
        return float(curve[-1][column]) if curve else math.nan

    def loss_at(self, column: str, most: float) -> float | None:
        """Return the mean loss of the seeds when a column of their curves was at `most`.

        Between two measures it is interpolated. None where a seed diverged, or has no measure
        after training began that is within `most`.
        """
        found = [loss_at(seed["curve"], column, most) for seed in self.seeds if "curve" in seed]
        known = [loss for loss in found if loss is not None]
        return statistics.fmean(known) if len(known) == len(self.seeds) else None

    def first(self, name: str) -> Any:
        """Return what the first seed that did not diverge has under a name."""
        return next((seed[name] for seed in self.seeds if seed["loss"] is not None), None)


def loss_at(curve: Sequence[Ended], column: str, most: float) -> float | None:
    """Return the loss where a column of a curve reaches `most`, linearly between measures.

    None if the first measure after the beginning is beyond it.
    """
    measured = curve[1:]  # the first is before the first round
    at = bisect.bisect_right([row[column] for row in measured], most * (1 + 1e-9))
    if at == 0:
        return None
    before = measured[at - 1]
    if at == len(measured):
        return float(before["loss"])
    after = measured[at]
    share = (most - before[column]) / (after[column] - before[column])
    return float(before["loss"] + max(0.0, share) * (after["loss"] - before["loss"]))


def best_rate(compare: Compare, method: str, found: Mapping[PlannedTraining, Ended]) -> float:
    """Return the rate of a method's grid with the lowest loss; the least if it diverged at each."""
    tuned = zip(compare.methods[method].rates, grid(compare, method), strict=True)
    stable = {rate: found[one]["loss"] for rate, one in tuned if found[one]["loss"] is not None}
    return min(stable, key=stable.__getitem__) if stable else min(compare.methods[method].rates)


def rows(compare: Compare, found: Mapping[PlannedTraining, Ended]) -> list[Row]:
    """Return the rows of the table, the best first, those with failures after those without."""
    table = []
    for failure in (NO_FAILURE, *compare.failures):
        some = []
        for name, method in compare.methods.items():
            rate = best_rate(compare, name, found)
            tuned = PlannedTraining(name, rate, compare.seeds[0])
            seeds = [PlannedTraining(name, None, seed, failure) for seed in compare.seeds]
            if failure == NO_FAILURE:
                seeds[0] = tuned
            results = tuple(found[one] for one in seeds)
            steps = card_of_method(method).local_steps
            some.append(Row(name, method.label or name, failure, steps, rate, results))
        table += sorted(some, key=lambda row: row.mean)
    return table


def beats(better: Row, worse: Row) -> bool:
    """Return whether every seed of a row has a lower loss than every seed of another."""
    if not better.losses or math.isinf(better.mean):
        return False
    return math.isinf(worse.mean) or max(better.losses) < min(worse.losses)


def front(table: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in loss with as few bytes, by their means."""
    known = [row for row in table if not math.isinf(row.mean)]
    return [
        row
        for row in known
        if not any(
            other.mean < row.mean and other.total("bytes_up") <= row.total("bytes_up")
            for other in known
        )
    ]


def record(row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """Return a row's numbers: losses in nats per token, sizes in bytes, times in seconds.

    `loss_at_equal_bytes` is at the bytes of the row that sends least, and `loss_at_equal_seconds`
    at the simulated seconds of the quickest, each without failures.
    """
    plain = [other for other in table if other.failure == NO_FAILURE]
    least, quickest = (
        min((other.total(column) for other in plain if other.losses), default=0.0)
        for column in ("bytes_up", "seconds")
    )
    of_a_step = (row.first("parameters") or math.nan) * row.local_steps / 8
    up, down = row.first("bytes_up"), row.first("bytes_down")
    return {
        "method": row.method,
        "failure": row.failure,
        "base_lr": row.rate,
        "seeds": len(row.seeds),
        "diverged": len(row.seeds) - len(row.losses),
        "loss": None if math.isinf(row.mean) else row.mean,
        "spread": row.spread,
        "lowest": min(row.losses, default=None),
        "highest": max(row.losses, default=None),
        "loss_at_equal_bytes": row.loss_at("bytes_up", least),
        "loss_at_equal_seconds": row.loss_at("seconds", quickest),
        "tokens": row.first("tokens"),
        "rounds": row.first("rounds"),
        "local_steps": row.local_steps,
        "bytes_up": row.total("bytes_up") if row.losses else None,
        "bytes_up_a_round": up,
        "bytes_down_a_round": down,
        "bits_per_parameter_and_step_up": None if up is None else up / of_a_step,
        "bits_per_parameter_and_step_down": None if down is None else down / of_a_step,
        "simulated_seconds": row.first("simulated_seconds"),
        "tokens_per_second": row.first("tokens_per_second"),
        "peak_bytes": row.first("peak_bytes"),
        "trainings": [{"key": seed["key"], "params": seed.get("params")} for seed in row.seeds],
    }
