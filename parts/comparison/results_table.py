"""The table of a comparison: what each method came to at equal tokens, bytes and hours."""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.machine.progress import size
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.ended import TRAINED
from parts.comparison.pairs import Difference, differences
from parts.comparison.search import Found, found
from parts.comparison.trainings import Ended, PlannedTraining, card_of_method, trials, tried
from pipeline.audit.verdict_text import measured_on


class Row(NamedTuple):
    """A method under a failure, at the best of its search."""

    method: str
    label: str  # what people call it
    failure: str  # what went wrong, or `none`
    local_steps: int  # its local steps of a round
    found: Found  # by its search: the values that its seeds were trained with
    seeds: tuple[Ended, ...]  # what came of its seeds, those that diverged included

    @property
    def name(self) -> str:
        """The method, and what went wrong, if anything did."""
        return self.method if self.failure == NO_FAILURE else f"{self.method}, {self.failure}"

    @property
    def losses(self) -> list[float]:
        """Held-out losses of the seeds that did not diverge, nats per token."""
        return [seed["loss"] for seed in self.seeds if seed["loss"] is not None]

    @property
    def mean(self) -> float:
        """The mean of the losses; infinite if a seed diverged."""
        complete = len(self.losses) == len(self.seeds)
        return statistics.fmean(self.losses) if complete else math.inf

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
        return self._mean([loss_at(s["curve"], column, most) for s in self.seeds if "curve" in s])

    def tokens_to(self, loss: float) -> float | None:
        """Return the mean tokens of the seeds until a loss; None where one did not come to it."""
        # With a failure only the beginning and the end are measured.
        curves = [s["curve"] for s in self.seeds if "curve" in s and self.failure == NO_FAILURE]
        return self._mean([tokens_to(curve, loss) for curve in curves])

    def first(self, name: str) -> Any:
        """Return what the first seed that did not diverge has under a name."""
        return next((seed[name] for seed in self.seeds if seed["loss"] is not None), None)

    def _mean(self, values: Sequence[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return statistics.fmean(numbers) if len(numbers) == len(self.seeds) else None


def tokens_to(curve: Sequence[Ended], loss: float) -> float | None:
    """Return the tokens at which a curve first has a loss, linearly between measures, or None."""
    for before, after in zip(curve, curve[1:], strict=False):
        if before["loss"] <= loss:  # it began there
            return float(before["tokens"])
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return float(before["tokens"] + share * (after["tokens"] - before["tokens"]))
    return None


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


def rows(compare: Compare, results: Mapping[PlannedTraining, Ended]) -> list[Row]:
    """Return the rows of the table, the best first, those with failures after those without."""
    table = []
    for failure in (NO_FAILURE, *compare.failures):
        group = []
        for name, method in compare.methods.items():
            seeds = [PlannedTraining(name, None, seed, failure) for seed in compare.seeds]
            before = [results[t] for t in trials(compare, name)]
            best = found(method.search, tried(compare, name, before))
            steps = card_of_method(compare, name, best.values).local_steps
            ended = tuple(results[t] for t in seeds)
            group.append(Row(name, method.label or name, failure, steps, best, ended))
        table += sorted(group, key=lambda row: row.mean)
    return table


def plain_rows(table: Sequence[Row]) -> list[Row]:
    """Return the rows without failures."""
    return [row for row in table if row.failure == NO_FAILURE]


def row_pairs(table: Sequence[Row]) -> list[Difference]:
    """Return the differences of each two rows without failures that did not diverge."""
    return differences({r.method: r.losses for r in plain_rows(table) if not math.isinf(r.mean)})


def failure_costs(table: Sequence[Row]) -> list[Difference]:
    """Return what each failure adds to the loss of each method, where no seed diverged."""
    losses = {row.name: row.losses for row in table if not math.isinf(row.mean)}
    named = [(row.method, row.name) for row in table if row.failure != NO_FAILURE]
    return differences(losses, [pair for pair in named if {*pair} <= {*losses}])


def front(table: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in loss with as few bytes, by their means."""
    finite = [row for row in table if not math.isinf(row.mean)]
    return [
        row
        for row in finite
        if not any(
            other.mean < row.mean and other.total("bytes_up") <= row.total("bytes_up")
            for other in finite
        )
    ]


def goal(compare: Compare, table: Sequence[Row]) -> float:
    """Return the loss to which tokens are counted: the file's, or that of the worst training."""
    losses = [loss for row in plain_rows(table) for loss in row.losses]
    return compare.reach or max(losses, default=math.inf)


def record(compare: Compare, row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """Return a row's numbers: losses in nats per token, sizes in bytes, times in seconds.

    `loss_at_equal_bytes` is at the bytes of the row that sends least, and `loss_at_equal_seconds`
    at the simulated seconds, of training and links, of the quickest, each without failures.
    """
    plain = plain_rows(table)
    least, quickest = (
        min((other.total(column) for other in plain if other.losses), default=0.0)
        for column in ("bytes_up", TRAINED)
    )
    of_a_step = (row.first("parameters") or math.nan) * row.local_steps / 8
    up, down, took = row.first("bytes_up"), row.first("bytes_down"), row.first(TRAINED)
    return {
        "method": row.method,
        "failure": row.failure,
        "this_project": compare.methods[row.method].ours,
        **{
            f"{'tuned' if key in row.found.tuned else 'stated'}_{key}": value
            for key, value in row.found.values.items()
        },
        "edge": " ".join(row.found.edges),
        "seeds": len(row.seeds),
        "diverged": len(row.seeds) - len(row.losses),
        "loss": None if math.isinf(row.mean) else row.mean,
        "spread": row.spread,
        "lowest": min(row.losses, default=None),
        "highest": max(row.losses, default=None),
        "tokens_to_goal": row.tokens_to(goal(compare, table)),
        "loss_at_equal_bytes": row.loss_at("bytes_up", least),
        "loss_at_equal_seconds": row.loss_at(TRAINED, quickest),
        "tokens": row.first("tokens"),
        "outer_steps": row.first("rounds"),
        "local_steps": row.local_steps,
        "bytes_up": row.total("bytes_up") if row.losses else None,
        "bytes_up_a_round": up,
        "bytes_down_a_round": down,
        "bits_per_parameter_and_step_up": None if up is None else up / of_a_step,
        "bits_per_parameter_and_step_down": None if down is None else down / of_a_step,
        "train_seconds": took,
        "coordinator_seconds": None if took is None else row.first("simulated_seconds") - took,
        "seconds_for_all_tokens": took and took * compare.tokens / max(row.first("tokens"), 1),
        "tokens_per_second": row.first("tokens_per_second"),
        "peak_bytes": row.first("peak_bytes"),
    }


# ---- As text, with rounded numbers ----


def made_of(compare: Compare, table: Sequence[Row], code: str) -> str:
    """Return how the trainings were done; `code` begins with what a seed draws."""
    params = next((row.first("parameters") for row in table if row.losses), None)
    ratio = "" if params is None else f", {compare.tokens / params:.2g} for each parameter"
    tokens = [row.first("tokens") for row in plain_rows(table) if row.losses] or [compare.tokens]
    trained = " to ".join(f"{most:,}" for most in sorted({min(tokens), max(tokens)}))
    count = compare.tuning.trainings
    search = "The values of each method are stated, not tuned."
    if count > 1:
        search = (
            f"Each method was tuned by at most {count} trainings, until the double and the half "
        )
        search += "of each value were no better (search.py); an edge: of which that was not tried. "
        search += f"They have seed {compare.tuning.seed} and held-out rows that are not scored."
    return (
        f"{trained} tokens a training{ratio}, of {compare.base}. {search} Scored with "
        f"seeds {', '.join(map(str, compare.seeds))}, the same for all methods; a seed draws "
        f"{code}. A loss is the mean of the seeds, in nats per token, and their standard "
        "deviation. Equal bytes are those that the method sends that sends least, equal hours "
        "those of the quickest. Hours are simulated: training and links; the coordinator's stand "
        "beside. Tokens per second include start and compilation, beside what else the machine "
        "did. A star: this project's own."
    )


# The heads above the columns, and a row of as many strings for each method, its name first.
TextTable = tuple[tuple[str, ...], list[tuple[str, ...]]]


def tables(compare: Compare, table: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the table without failures, and by failure those of losses, hours and tokens."""
    plain, known = plain_rows(table), {(row.method, row.failure): row for row in table}
    records = {key: record(compare, row, table) for key, row in known.items()}
    names = {r.method: r.label + "*" * compare.methods[r.method].ours for r in plain}
    behind = {other.worse: other for other in row_pairs(table) if other.better == plain[0].method}
    cells = [_cells(row, records[row.method, NO_FAILURE], behind.get(row.method)) for row in plain]
    goal_head = f"tokens to {goal(compare, table):.3f}"
    heads = ("method", *(goal_head if head == GOAL else head for head in cells[0]))
    lines = [(names[r.method], *c.values()) for r, c in zip(plain, cells, strict=True)]
    yield heads, lines
    if not compare.failures:
        return
    failures = (NO_FAILURE, *compare.failures)
    costs = {pair.worse: pair for pair in failure_costs(table)}
    of_failures = {
        "held-out loss": lambda row, known: _loss(row),
        "what is added to the loss": lambda row, known: str(costs.get(row.name, "–")),
        "simulated hours": lambda row, known: _hours(known["train_seconds"]),
        "hours for the same tokens": lambda row, known: _hours(known["seconds_for_all_tokens"]),
        "tokens": lambda row, known: _or_dash(known["tokens"], "{:,}".format),
    }
    for title, cell in of_failures.items():
        rows = []
        for row in plain:
            keys = [(row.method, failure) for failure in failures]
            rows.append((names[row.method], *(cell(known[k], records[k]) for k in keys)))
        yield (f"{title}, by what fails", *failures), rows


GOAL = "tokens to a loss"


def _cells(row: Row, numbers: Mapping[str, Any], behind: Difference | None) -> dict[str, str]:
    """Return a row's cells by the heads above them."""
    return {
        "tuned": _values(row.found, row.found.tuned),
        "stated": _values(row.found, [k for k in row.found.values if k not in row.found.tuned]),
        "held-out loss": _loss(row),
        "behind the first": "–" if behind is None else str(behind),
        GOAL: _or_dash(numbers["tokens_to_goal"], "{:,.0f}".format),
        "at equal bytes": _or_dash(numbers["loss_at_equal_bytes"], "{:.3f}".format),
        "at equal hours": _or_dash(numbers["loss_at_equal_seconds"], "{:.3f}".format),
        "outer steps": _or_dash(numbers["outer_steps"], "{:,}".format),
        "sent a round": _or_dash(numbers["bytes_up_a_round"], size),
        "received": _or_dash(numbers["bytes_down_a_round"], size),
        "bits per parameter and step, sent": _or_dash(numbers["bits_per_parameter_and_step_up"]),
        "bits received": _or_dash(numbers["bits_per_parameter_and_step_down"]),
        "simulated hours": _hours(numbers["train_seconds"]),
        "coordinator's": _hours(numbers["coordinator_seconds"]),
        "hours for the same tokens": _hours(numbers["seconds_for_all_tokens"]),
        "tokens per second": _or_dash(numbers["tokens_per_second"], "{:,.0f}".format),
        "memory": _or_dash(numbers["peak_bytes"], size),
    }


def _values(found: Found, keys: Sequence[str]) -> str:
    edge = {key: " (edge)" for key in found.edges}
    return ", ".join(f"{key} {found.values[key]:g}{edge.get(key, '')}" for key in keys) or "–"


def _loss(row: Row) -> str:
    diverged = len(row.seeds) - len(row.losses)
    if diverged:
        return "diverged" + (f", {diverged} of {len(row.seeds)}" if row.losses else "")
    spread = "" if row.spread is None else f" ± {row.spread:.3f}"
    return f"{row.mean:.3f}{spread}"


def _hours(seconds: float | None) -> str:
    return _or_dash(None if seconds is None else seconds / 3600)


def _or_dash(value: float | None, form: Callable[..., str] = "{:.3g}".format) -> str:
    return "–" if value is None or math.isnan(value) else form(value)


def conclusions(compare: Compare, table: Sequence[Row]) -> Iterator[str]:
    """Yield what losses are measured on, what can be told apart, and the front."""
    plain = plain_rows(table)
    if text := _measured_on(plain):
        yield text
    if len(compare.seeds) == 1:
        yield "One seed: which differences exceed those of seeds is not known."
    else:
        if pairs := row_pairs(table):
            yield from _told_apart(pairs, {row.method: row.label for row in plain})
        yield from _shown_costs(failure_costs(table), {row.name: row for row in table})
    if labels := ", ".join(row.label for row in front(plain)):
        yield f"No other method has a lower loss with as few bytes: {labels}."
    for row in plain:
        if len(row.losses) < len(row.seeds):
            yield f"{row.label}: it diverged with {len(row.seeds) - len(row.losses)} seeds."


def _measured_on(plain: Sequence[Row]) -> str | None:
    rows = next((row.first("held_out_rows") for row in plain if row.losses), None)
    if rows is None:
        return None
    known = (seed.get("held_out_stderr") for row in plain for seed in row.seeds)
    errors = [error for error in known if error is not None]
    text = measured_on(max(errors, default=None), *rows)
    return f"A loss is measured on {text} at most; on equal seeds, every method on the same."


def _told_apart(pairs: Sequence[Difference], labels: Mapping[str, str]) -> Iterator[str]:
    unsure = [pair for pair in pairs if not pair.sure]
    yield f"Differences are {_together(pairs)}.{'' if unsure else ' All differ.'}"
    for better, group in itertools.groupby(unsure, lambda pair: pair.better):
        others = "; ".join(f"{labels[pair.worse]} ({pair})" for pair in group)
        yield f"{labels[better]} cannot be told apart from: {others}."


def _shown_costs(costs: Sequence[Difference], rows: Mapping[str, Row]) -> Iterator[str]:
    shown = [f"{rows[c.worse].label}, {rows[c.worse].failure} ({c})" for c in costs if c.sure]
    if costs:
        yield f"What failures add is {_together(costs)}. Not 0: {'; '.join(shown) or 'none'}."


def _together(pairs: Sequence[Difference]) -> str:
    of_all = "of equal seeds, with t intervals that hold together 95 times in 100"
    return f"{of_all} (Bonferroni, pairs: {len(pairs)})"
