"""The table of a comparison: what each method came to at equal tokens, bytes and hours."""

import bisect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lockstep.machine.progress import size
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.trainings import PlannedTraining, card_of_method, grid
from pipeline.audit.verdict_text import measured_on

Ended = Mapping[str, Any]
HEADS = (
    "base rate",
    "held-out loss",
    "at equal bytes",
    "at equal hours",
    "sent a round",
    "received",
    "bits per parameter and step, sent",
    "received",
    "simulated hours",
    "tokens per second",
    "memory",
)


class Row(NamedTuple):
    """A method under a failure, at its best rate."""

    method: str
    label: str  # what people call it
    failure: str  # what went wrong, or `none`
    local_steps: int  # its local steps of a round
    rate: float  # its base learning rate
    seeds: tuple[Ended, ...]  # what came of its seeds, those that diverged included

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


# ---- As text, with rounded numbers ----


def made_of(compare: Compare, code: str) -> str:
    """Return what the trainings were of."""
    seeds = ", ".join(map(str, compare.seeds))
    return (
        f"{compare.tokens:,} tokens a training, of {compare.base}; seeds {seeds}, each with other "
        f"weights, another order of the data and another assignment; {code}. A loss is the mean of "
        "the seeds, in nats per token, and their standard deviation. Equal bytes are those that "
        "the method sends that sends least, equal hours those of the quickest. Tokens per second "
        "include start and compilation, beside what else the machine did."
    )


class TextTable(NamedTuple):
    """A table of strings: a row for each method, its name first."""

    heads: tuple[str, ...]  # above the columns; the first is of the names
    rows: list[tuple[str, ...]]  # as many strings as heads each


def tables(compare: Compare, table: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the table where nothing fails, and those of losses, hours and tokens by what fails."""
    plain = [row for row in table if row.failure == NO_FAILURE]
    yield TextTable(("method", *HEADS), [(row.label, *cells(row, table)) for row in plain])
    if not compare.failures:
        return
    failures = (NO_FAILURE, *compare.failures)
    known = {(row.method, row.failure): row for row in table}
    cells_of = {"held-out loss": _loss, "simulated hours": _hours, "tokens": _tokens}
    for what, cell in cells_of.items():
        rows = [
            (row.label, *(cell(known[row.method, failure], table) for failure in failures))
            for row in plain
        ]
        yield TextTable((f"{what}, by what fails", *failures), rows)


def cells(row: Row, table: Sequence[Row]) -> tuple[str, ...]:
    """Return a row's cells below `HEADS`."""
    known = record(row, table)
    return (
        f"{row.rate:g}",
        _loss(row, table),
        _or_dash(known["loss_at_equal_bytes"], "{:.3f}"),
        _or_dash(known["loss_at_equal_seconds"], "{:.3f}"),
        _size(known["bytes_up_a_round"]),
        _size(known["bytes_down_a_round"]),
        _or_dash(known["bits_per_parameter_and_step_up"], "{:.3g}"),
        _or_dash(known["bits_per_parameter_and_step_down"], "{:.3g}"),
        _hours(row, table),
        _or_dash(known["tokens_per_second"], "{:,.0f}"),
        _size(known["peak_bytes"]),
    )


def _loss(row: Row, table: Sequence[Row]) -> str:
    known = record(row, table)
    if known["diverged"]:
        return "diverged" + (f", {known['diverged']} of {len(row.seeds)}" if row.losses else "")
    spread = "" if row.spread is None else f" ± {row.spread:.3f}"
    return f"{known['loss']:.3f}{spread}"


def _hours(row: Row, table: Sequence[Row]) -> str:
    return _or_dash((record(row, table)["simulated_seconds"] or math.nan) / 3600, "{:.3g}")


def _tokens(row: Row, table: Sequence[Row]) -> str:
    return _or_dash(record(row, table)["tokens"], "{:,}")


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else form.format(value)


def _size(nbytes: float | None) -> str:
    return "–" if nbytes is None else size(nbytes)


def conclusions(compare: Compare, table: Sequence[Row]) -> Iterator[str]:
    """Yield what losses rest on, which differences exceed those of seeds, the front, and rates."""
    plain = [row for row in table if row.failure == NO_FAILURE]
    if text := _measured_on(plain):
        yield text
    if len(compare.seeds) == 1:
        yield "One seed: which differences exceed those of seeds is not known."
    elif len(plain) > 1:
        yield _ranking(plain)
    labels = ", ".join(row.label for row in front(plain))
    yield f"No other method has a lower loss with as few bytes: {labels}."
    for row in plain:
        rates = compare.methods[row.method].rates
        if row.seeds[0]["loss"] is None:
            yield f"{row.label}: it diverged at every rate of its grid. Add lower ones."
        elif len(rates) == 1:
            yield f"{row.label}: its rate is stated, not tuned."
        elif row.rate in (min(rates), max(rates)):
            yield f"{row.label}: its best rate, {row.rate:g}, is at an edge of its grid."


def _measured_on(plain: Sequence[Row]) -> str | None:
    rows = next((row.first("held_out_rows") for row in plain if row.losses), None)
    if rows is None:
        return None
    ended = [seed for row in plain for seed in row.seeds if seed["loss"] is not None]
    errors = [seed["held_out_stderr"] for seed in ended if seed["held_out_stderr"] is not None]
    text = measured_on(max(errors, default=None), *rows)
    return f"A loss is measured on {text} at most; a seed draws the same for every method."


def _ranking(plain: Sequence[Row]) -> str:
    unsure = [
        f"{better.label} and {worse.label}"
        for better, worse in combinations(plain, 2)
        if not beats(better, worse)
    ]
    rest = f", but for: {'; '.join(unsure)}" if unsure else ""
    return f"Every seed of a method has a lower loss than every seed of those below it{rest}."
