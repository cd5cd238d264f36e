"""The table of a comparison: what each method came to at equal tokens, bytes and hours."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.machine.progress import size
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.pairs import Difference, differences
from parts.comparison.search import Found, found
from parts.comparison.training_result import CURVE_COLUMNS, TRAINED
from parts.comparison.trainings import Ended, PlannedTraining, card_of_method, trials, tried
from pipeline.audit.verdict_text import measured_on, seen_in_train

AS_FEW = 1.1  # times the bytes of a row are as few
WHOLE_BITS = 32  # bits per parameter and local step, of whole gradients


class Row(NamedTuple):
    """A row of the results' table: a method under a failure, at the best of its search."""

    method: str
    label: str  # what people call it
    failure: str  # what went wrong, or `none`
    local_steps: int  # its local steps of a round
    found: Found  # by its search: the values that its seeds were trained with
    seeds: tuple[Ended, ...]  # what came of its seeds, those that diverged included

    @property
    def name(self) -> str:
        """A row's name: the method, and what went wrong, if anything did."""
        return self.method if self.failure == NO_FAILURE else f"{self.method}, {self.failure}"

    @property
    def losses(self) -> list[float]:
        """Held-out losses of the row's seeds that did not diverge, nats per token."""
        return [seed["loss"] for seed in self.seeds if seed["loss"] is not None]

    @property
    def mean(self) -> float:
        """The mean of the row's losses; infinite if a seed diverged."""
        complete = len(self.losses) == len(self.seeds)
        return statistics.fmean(self.losses) if complete else math.inf

    @property
    def spread(self) -> float | None:
        """The standard deviation of the row's losses; None for fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    def total(self, column: str) -> float:
        """Return the last value of a column of the row's first seed's curve, such as bytes_up.

        NaN where each seed diverged.
        """
        curve = self.first("curve")
        return float(curve[-1][column]) if curve else math.nan

    def bits(self, column: str) -> float | None:
        """Return the row's bits per parameter and local step of a round, sent or received."""
        sent, params = self.first(column), self.first("parameters")
        return None if sent is None else 8 * sent / (params * self.local_steps or math.nan)

    def first(self, name: str) -> Any:
        """Return what the row's first seed that did not diverge has under a name."""
        return next((seed[name] for seed in self.seeds if seed["loss"] is not None), None)

    @property
    def curve(self) -> list[Ended]:
        """The means of the row's seeds' measures; none where a seed diverged."""
        curves = [seed.get("curve", ()) for seed in self.seeds]
        if len({*map(len, curves)}) > 1:
            return []
        return [
            {name: statistics.fmean(point[name] for point in points) for name in points[0]}
            for points in zip(*curves, strict=True)
        ]


def reached(curve: Sequence[Ended], loss: float) -> Ended | None:
    """Return a row's measure where its curve first has a loss, linearly between two, or None."""
    for before, after in zip(curve, curve[1:], strict=False):
        if before["loss"] <= loss:  # it began there
            return before
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return {name: before[name] + share * (after[name] - before[name]) for name in before}
    return None


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
    """Return the table's rows without failures."""
    return [row for row in table if row.failure == NO_FAILURE]


def row_pairs(compare: Compare, table: Sequence[Row]) -> list[Difference]:
    """Return the differences of each two rows of the table that did not diverge.

    Tested are those that the file names, or all.
    """
    losses = {row.method: row.losses for row in plain_rows(table) if not math.isinf(row.mean)}
    return differences(losses, tested=[*map(frozenset, compare.pairs)] or None)


def failure_costs(table: Sequence[Row]) -> list[Difference]:
    """Return what each failure adds to a row's loss, where no seed diverged."""
    losses = {row.name: row.losses for row in table if not math.isinf(row.mean)}
    named = [(row.method, row.name) for row in table if row.failure != NO_FAILURE]
    return differences(losses, [pair for pair in named if {*pair} <= {*losses}])


def unbeaten(table: Sequence[Row], pairs: Sequence[Difference]) -> list[Row]:
    """Return the table's rows that nothing is shown to beat for their bytes, without failures.

    Each row with a lower mean loss and at most 1.1 times the bytes was tested against it, by
    `pairs` of `row_pairs`, and not told apart.
    """
    level = {frozenset(p[:2]) for p in pairs if p.holm is not None and not p.told_apart}
    finite = [row for row in plain_rows(table) if not math.isinf(row.mean)]
    return [
        row
        for row in finite
        if all(
            frozenset((row.method, other.method)) in level
            for other in finite
            if other.mean < row.mean and other.total("bytes_up") <= AS_FEW * row.total("bytes_up")
        )
    ]


def whole_gradients(table: Sequence[Row]) -> Row | None:
    """Return the table's best row whose peers send whole gradients, without failures."""
    finite = [row for row in plain_rows(table) if not math.isinf(row.mean)]
    whole = [row for row in finite if (row.bits("bytes_up") or 0) >= WHOLE_BITS]
    return min(whole, key=lambda row: row.mean, default=None)


def at_equal_loss(row: Row, reference: Row | None) -> dict[str, float | None]:
    """Return what a reference row needs for a row's loss: in all, as a ratio, its spread.

    Of bytes, tokens and simulated seconds. The ratio is of the means: where the reference's mean
    curve first has the row's mean loss. The spread is the standard deviation of the seeds' own
    ratios. None where a curve does not come to the loss.
    """
    needs, own = None, []
    if reference is not None and not math.isinf(row.mean):
        needs = reached(reference.curve, row.mean)
        pairs = zip(reference.seeds, row.seeds, strict=True)
        own = [reached(theirs["curve"], seed["loss"]) for theirs, seed in pairs]
    found: dict[str, float | None] = {}
    for column in CURVE_COLUMNS:
        ratios = [
            need[column] / seed["curve"][-1][column]
            for need, seed in zip(own, row.seeds, strict=False)
            if needs and need
        ]
        whole = len(ratios) == len(row.seeds) > 1
        found[f"equal_loss_{column}"] = needs and needs[column]
        found[f"equal_loss_{column}_ratio"] = needs and needs[column] / row.total(column)
        found[f"equal_loss_{column}_spread"] = statistics.stdev(ratios) if whole else None
    return found


def record(compare: Compare, row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers of a table's row: losses in nats, sizes in bytes, times in seconds."""
    took, (scored, of) = row.first(TRAINED), row.first("held_out_rows") or (None, None)
    return {
        "method": row.method,
        "failure": row.failure,
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
        **at_equal_loss(row, whole_gradients(table)),
        "tokens": row.first("tokens"),
        "parameters": row.first("parameters"),
        "held_out_rows": scored,
        "split_rows": of,
        "outer_steps": row.first("rounds"),
        "local_steps": row.local_steps,
        "bytes_up": row.total("bytes_up") if row.losses else None,
        "bytes_up_a_round": row.first("bytes_up"),
        "bytes_down_a_round": row.first("bytes_down"),
        "bits_per_parameter_and_step_up": row.bits("bytes_up"),
        "bits_per_parameter_and_step_down": row.bits("bytes_down"),
        "train_seconds": took,
        "coordinator_seconds": None if took is None else row.first("simulated_seconds") - took,
        "seconds_for_all_tokens": took and took * compare.tokens / max(row.first("tokens"), 1),
        "tokens_per_second": row.first("tokens_per_second"),
        "peak_bytes": row.first("peak_bytes"),
    }


# ---- As text, with rounded numbers ----


def made_of(compare: Compare, table: Sequence[Row], code: str, unit: str) -> str:
    """Return how the table's trainings were done; a seed draws `code`, and losses are in `unit`."""
    params = next((row.first("parameters") for row in table if row.losses), None)
    ratio = "" if params is None else f", {compare.tokens / params:.2g} for each parameter"
    tokens = [row.first("tokens") for row in plain_rows(table) if row.losses] or [compare.tokens]
    trained = " to ".join(f"{most:,}" for most in sorted({min(tokens), max(tokens)}))
    reference = whole_gradients(table)
    count = compare.tuning.trainings
    search = "The values of each method are stated, not tuned."
    if count > 1:
        search = f"Each method was tuned by at most {count} trainings, until the double and the "
        search += "half of each value were no better (search.py); an edge: of which that was not "
        search += f"tried. They have seed {compare.tuning.seed} and held-out rows not scored."
    return (
        f"{trained} tokens a training{ratio}, of {compare.base}. {search} Scored with "
        f"seeds {', '.join(map(str, compare.seeds))}, the same for all methods; a seed draws "
        f"{code}. A loss is the mean of the seeds, {unit}, ± their standard deviation; "
        "a difference is paired by seed, with a 95 % interval of that pair alone. At equal loss: "
        f"what the best method with whole gradients ({reference.label if reference else 'none'}) "
        "needs for the row's loss, as a multiple of what the row takes. Hours are simulated: "
        "training and links; the coordinator's stand beside. Tokens per second include start and "
        "compilation, beside what else the machine did."
    )


# The heads above the columns, and a row of as many strings for each method, its name first.
TextTable = tuple[tuple[str, ...], list[tuple[str, ...]]]


def tables(compare: Compare, table: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the table without failures, and by failure those of losses, hours and tokens."""
    plain, known = plain_rows(table), {(row.method, row.failure): row for row in table}
    records = {key: record(compare, row, table) for key, row in known.items()}
    pairs = row_pairs(compare, table)
    behind = {other.worse: other for other in pairs if other.better == plain[0].method}
    cells = [_cells(row, records[row.method, NO_FAILURE], behind.get(row.method)) for row in plain]
    lines = [(r.label, *c.values()) for r, c in zip(plain, cells, strict=True)]
    yield ("method", *cells[0]), lines
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
            rows.append((row.label, *(cell(known[k], records[k]) for k in keys)))
        yield (f"{title}, by what fails", *failures), rows


def _cells(row: Row, numbers: Mapping[str, Any], behind: Difference | None) -> dict[str, str]:
    """Return the cells of a table's row by the heads above them."""
    return {
        "tuned": _values(row.found, row.found.tuned),
        "stated": _values(row.found, [k for k in row.found.values if k not in row.found.tuned]),
        "held-out loss": _loss(row),
        "behind the first": "–" if behind is None else str(behind),
        "bytes at equal loss": _ratio(numbers, "bytes_up"),
        "tokens at equal loss": _ratio(numbers, "tokens"),
        "hours at equal loss": _ratio(numbers, TRAINED),
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


def _ratio(numbers: Mapping[str, Any], column: str) -> str:
    spread = numbers[f"equal_loss_{column}_spread"]
    more = "" if spread is None else f" ± {spread:.2g}"
    return _or_dash(numbers[f"equal_loss_{column}_ratio"]) + more


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
    """Yield what losses are measured on, what was shown, and what nothing is shown to beat."""
    plain, rows = plain_rows(table), {row.name: row for row in table}
    if text := _measured_on(plain):
        yield text
    pairs = row_pairs(compare, table)
    if len(compare.seeds) == 1:
        yield "One seed: which differences exceed those of seeds is not known."
    else:
        tested, few = [pair for pair in pairs if pair.holm is not None], bool(compare.pairs)
        named = "named before the trainings" if few else "each two methods"
        yield from _told_apart(tested, named, rows, [True] * few + [False])
        costs = failure_costs(table)
        yield from _told_apart(costs, "a method with a failure and without", rows, [True])
    if labels := ", ".join(row.label for row in unbeaten(table, pairs)):
        yield (
            f"Nothing is shown to beat for its bytes: {labels}. That is: whatever has a lower mean "
            f"loss, and sends at most {AS_FEW} times as many bytes, was tested and not told apart."
        )
    for row in plain:
        if len(row.losses) < len(row.seeds):
            yield f"{row.label}: it diverged with {len(row.seeds) - len(row.losses)} seeds."


def _measured_on(plain: Sequence[Row]) -> str | None:
    seeds = [seed for row in plain for seed in row.seeds if seed["loss"] is not None]
    if not seeds:
        return None
    errors = [seed["held_out_stderr"] for seed in seeds if seed["held_out_stderr"] is not None]
    shares = [seed.get("held_out_seen") for seed in seeds]
    text = measured_on(max(errors, default=None), *seeds[0]["held_out_rows"])
    new = seen_in_train(None if None in shares else max(shares))
    return f"A loss is measured on {text} at most; on equal seeds, every method on the same; {new}."


def _told_apart(
    pairs: Sequence[Difference], of: str, rows: Mapping[str, Row], said: Sequence[bool]
) -> Iterator[str]:
    apart = sum(pair.told_apart for pair in pairs)
    if pairs:
        yield f"Tested together by Holm at 5 %: {len(pairs)} pairs, {of}; {apart} told apart."
    for shown in said if pairs else ():
        each = [
            f"{_name(rows[pair.better])} - {_name(rows[pair.worse])} ({pair})"
            for pair in pairs
            if pair.told_apart == shown
        ]
        yield f"{'Told' if shown else 'Not told'} apart: {'; '.join(each) or 'none'}."


def _name(row: Row) -> str:
    return row.label if row.failure == NO_FAILURE else f"{row.label}, {row.failure}"
