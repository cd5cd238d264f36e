"""A comparison for people and programs: Markdown, CSV, JSON and plots in data/compare/."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.comparison.compare_file import NO_FAILURE, Compare
from pipeline.comparison.plot import draw
from pipeline.comparison.table import Row, beats, front
from pipeline.stage.artifacts import write_bytes, write_json, write_text
from pipeline.stage.progress import size

NAME = "comparison"


def write(folder: Path, compare: Compare, table: Sequence[Row], code: str) -> list[Path]:
    """Write the table in each form, and the plots; return the files.

    Args:
      folder: Where.
      compare: The comparison.
      table: Its rows.
      code: What stands for the code that trained, for people.
    """
    records = [record(row, table) for row in table]
    write_text(folder / f"{NAME}.md", "\n".join(markdown(compare, table, code)) + "\n")
    write_json(folder / f"{NAME}.json", {"code": code, "rows": records})
    text = io.StringIO()
    names = [name for name in records[0] if name != "trainings"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(folder / f"{NAME}.csv", text.getvalue())
    write_bytes(folder / f"{NAME}.png", draw([row for row in table if row.failure == NO_FAILURE]))
    return [folder / f"{NAME}.{ending}" for ending in ("md", "csv", "json", "png")]


def record(row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """Return a row's numbers: losses in nats per token, sizes in bytes, times in seconds.

    `loss_at_equal_bytes` is at the bytes of the row that sends least, and `loss_at_equal_seconds`
    at the simulated seconds of the quickest, each without failures.
    """
    plain = [other for other in table if other.failure == NO_FAILURE]
    least, quickest = (
        min(filter(None, (other.total(column) for other in plain)), default=0)
        for column in ("bytes_up", "seconds")
    )
    bits, peers_down = row.first("bits_per_parameter_and_round"), row.first("bytes_down")
    steps = (row.first("tokens") or 0) / (row.first("rounds") or 1)
    up = row.first("bytes_up")
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
        "tokens": row.total("tokens"),
        "tokens_a_round": steps,
        "bytes_up": row.total("bytes_up"),
        "bytes_up_a_round": up,
        "bytes_down_a_round": peers_down,
        "bits_per_parameter_and_round": bits,
        "simulated_seconds": row.total("seconds"),
        "tokens_per_second": row.first("tokens_per_second"),
        "peak_bytes": row.first("peak_bytes"),
        "trainings": [{"key": seed["key"], "params": seed.get("params")} for seed in row.seeds],
    }


def markdown(compare: Compare, table: Sequence[Row], code: str) -> Iterator[str]:
    """Yield the lines of the table for people, and what may be concluded from it."""
    seeds = ", ".join(map(str, compare.seeds))
    yield (
        f"{compare.tokens:,} tokens a run, of {compare.base}; seeds {seeds}, each with other "
        f"weights, another order of the data and another assignment; {code}."
    )
    for failure in (NO_FAILURE, *compare.failures):
        some = [row for row in table if row.failure == failure]
        yield ""
        yield from _table(some, table, failure)
    yield ""
    plain = [row for row in table if row.failure == NO_FAILURE]
    yield from _ranking(plain)
    yield from _tuning(compare, plain)


def _table(some: Sequence[Row], table: Sequence[Row], failure: str) -> Iterator[str]:
    heads = ("method" if failure == NO_FAILURE else f"method, with {failure}", "rate")
    heads += ("held-out loss", "at equal bytes", "at equal hours", "sent a round", "received")
    heads += ("bits per parameter and round", "simulated hours", "tokens per second", "memory")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in some:
        known = record(row, table)
        loss = "diverged" if known["loss"] is None else f"{known['loss']:.3f}"
        if row.spread is not None and known["loss"] is not None:
            loss += f" ± {row.spread:.3f}"
        cells = (
            row.label,
            f"{row.rate:g}",
            loss,
            _or_dash(known["loss_at_equal_bytes"], "{:.3f}"),
            _or_dash(known["loss_at_equal_seconds"], "{:.3f}"),
            _size(known["bytes_up_a_round"]),
            _size(known["bytes_down_a_round"]),
            _or_dash(known["bits_per_parameter_and_round"], "{:.3g}"),
            _or_dash((known["simulated_seconds"] or math.nan) / 3600, "{:.3g}"),
            _or_dash(known["tokens_per_second"], "{:,.0f}"),
            _size(known["peak_bytes"]),
        )
        yield f"| {' | '.join(cells)} |"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else form.format(value)


def _size(nbytes: float | None) -> str:
    return "–" if nbytes is None else size(nbytes)


def _ranking(plain: Sequence[Row]) -> Iterator[str]:
    """Lines on which differences are more than those of seeds, and on the front."""
    several = plain and len(plain[0].seeds) > 1
    for better, worse in zip(plain, plain[1:], strict=False):
        if not several:
            break
        sure = "every seed of it" if beats(better, worse) else "not every seed of it"
        yield f"- {better.label} before {worse.label}: {sure} has a lower loss than every other."
    if not several:
        yield "- One seed: which differences are more than those of seeds is not known."
    labels = ", ".join(row.label for row in front(plain))
    yield f"- No other has a lower loss with as few bytes: {labels}."


def _tuning(compare: Compare, plain: Sequence[Row]) -> Iterator[str]:
    """Lines on rates that were not tuned, or whose best may lie outside their grid."""
    for row in plain:
        rates = compare.methods[row.method].rates
        if len(rates) == 1:
            yield f"- {row.label}: its rate is stated, not tuned."
        elif row.rate in (min(rates), max(rates)):
            yield f"- {row.label}: its best rate, {row.rate:g}, is at an edge of its grid."
