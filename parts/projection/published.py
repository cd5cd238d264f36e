"""Published tables beside ours: `snakemake published` writes them to data/published/."""

import csv
import io
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.files import write_text
from parts.projection.utilisation import GRID, ModelOnLink, in_turn, needed, place, streaming

FOLDER = Path("data/published")
STEPS = 100  # of Streaming DiLoCo's table
MINUTES_OF_A_YEAR = 525_600
FAILURES = 20_000  # of a simulated learner
OVERLAP = {"streaming": (1 / 3, 1), "overlapped": (1.5, 1), "overlapped-fp4": (1.5, 4)}


class Cell(NamedTuple):
    """A number of a table: its table, row and column, as published, ours, and how far apart.

    `apart` is in steps of the bandwidth grid, or in points of percent.
    """

    table: str
    row: str
    column: str
    published: float
    ours: float
    apart: float


def numbers() -> dict[str, Any]:
    """Return published.toml."""
    path = Path(__file__).with_name("published.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def table6(given: dict[str, Any]) -> Iterator[Cell]:
    """Yield the bandwidths of DiLoCo and data parallelism, arXiv 2503.09799."""
    for name, rows in given["table6"].items():
        model = _model(given, "table6", name)
        for steps, printed in rows.items():
            share = partial(in_turn, model, int(steps))
            yield from _bandwidths(
                "2503.09799 table 6", f"{name}, H {steps}", given, printed, share
            )


def table4(given: dict[str, Any]) -> Iterator[Cell]:
    """Yield the bandwidths of Streaming DiLoCo, arXiv 2501.18512."""
    for name, rows in given["table4"].items():
        model = _model(given, "table4", name)
        for method, printed in rows.items():
            share: Callable[[float], float]
            if method in OVERLAP:
                hidden, fewer = OVERLAP[method]
                smaller = model._replace(bits=model.bits / fewer)
                share = partial(streaming, smaller, STEPS, hidden=hidden)
            else:
                share = partial(in_turn, model, STEPS if method == "diloco" else 1)
            yield from _bandwidths("2501.18512 table 4", f"{name}, {method}", given, printed, share)


def goodput(given: dict[str, Any]) -> Iterator[Cell]:
    """Yield the goodput of Decoupled DiLoCo, arXiv 2604.21428, by a simulation of its failures."""
    table, minutes = given["goodput"], given["goodput"]["minutes"]
    rows = [("not elastic", 1, table["whole"])]
    rows += [(f"{count} learners", int(count), cells) for count, cells in table["learners"].items()]
    for row, learners, printed in rows:
        for chips, percent in zip(table["chips"], printed, strict=True):
            rate = chips / learners / MINUTES_OF_A_YEAR
            lost = minutes["whole"] if row == "not elastic" else _lost(minutes, rate)
            ours = 100 * simulated(rate, lost, seed=0)
            cell = ("2604.21428 table 1, goodput", row, f"{chips:,.0f} chips")
            yield Cell(*cell, percent, ours, abs(ours - percent))


def closed(rate: float, lost: float) -> float:
    """Return the share of time that trains: 1 / (1 + rate * lost)."""
    return 1 / (1 + rate * lost)


def simulated(rate: float, lost: float, seed: int) -> float:
    """Return the same from so many failures drawn: times between them and times lost, exponential.

    Args:
      rate: Failures a minute.
      lost: Minutes that each costs, in the mean.
      seed: Of the draw.
    """
    rng = np.random.default_rng(seed)
    up = rng.exponential(1 / rate, FAILURES).sum()
    return float(up / (up + rng.exponential(lost, FAILURES).sum()))


def _lost(minutes: dict[str, float], rate: float) -> float:
    return float(minutes["a"] * rate ** -minutes["b"])


def _model(given: dict[str, Any], table: str, name: str) -> ModelOnLink:
    return ModelOnLink(**given["models"][name], bits=given["bits"][table][name])


def _bandwidths(
    table: str,
    row: str,
    given: dict[str, Any],
    printed: list[float],
    share: Callable[[float], float],
) -> Iterator[Cell]:
    for target, gigabits in zip(given["computes"], printed, strict=True):
        at, expected = needed(share, target), place(gigabits)
        ours = GRID[min(at, len(GRID) - 1)]
        yield Cell(table, row, f"{target:.0%}", gigabits, ours, abs(at - expected))


def cells() -> list[Cell]:
    """Return every cell of the three tables."""
    given = numbers()
    return [*table6(given), *table4(given), *goodput(given)]


def markdown(found: list[Cell]) -> Iterator[str]:
    """Yield a page: for each row what was published, and what our model has."""
    yield "# Published tables, and ours"
    yield ""
    for table in dict.fromkeys(cell.table for cell in found):
        some = [cell for cell in found if cell.table == table]
        columns = list(dict.fromkeys(cell.column for cell in some))
        exact = sum(cell.apart < 0.5 for cell in some)
        yield from ("", f"## arXiv {table}", "")
        unit = "points of percent" if "goodput" in table else "steps of the bandwidth grid"
        yield (
            f"Published, then ours. Of {len(some)} cells {exact} are equal as printed, and the "
            f"farthest is {max(cell.apart for cell in some):.2g} {unit} apart. The papers' "
            "figures are simulations too; ours have constants that were fitted to them."
        )
        yield from ("", f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}")
        for row in dict.fromkeys(cell.row for cell in some):
            values = [f"{c.published:g} / {c.ours:.3g}" for c in some if c.row == row]
            yield f"| {row} | {' | '.join(values)} |"


def main() -> None:
    """Write the page and the cells."""
    found = cells()
    write_text(FOLDER / "published.md", "\n".join(markdown(found)) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Cell._fields)
    writer.writerows(found)
    write_text(FOLDER / "published.csv", text.getvalue())
    print(f"published: {FOLDER}: published.md, published.csv")


if __name__ == "__main__":
    main()
