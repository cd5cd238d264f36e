"""The table of a comparison as text, with rounded numbers."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from lockstep.machine.progress import size
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.table import Row, beats, front, record
from pipeline.audit.verdict_text import measured_on

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
    """A table of strings: a row for each method, its name first.

    Attributes:
      heads: Above the columns; the first is of the names.
      rows: As many strings as heads each.
    """

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


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
