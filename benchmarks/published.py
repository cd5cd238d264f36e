"""Published tables beside ours: `snakemake published` writes them to data/published/.

Utilisation is the share of time that peers compute, by the bandwidth between them. A step of T
seconds is a forward pass of T / 3 and a backward pass that frees the layers one by one. After
`steps` of them each layer's message goes over one link in turn. The model is ours, made to agree
with the tables of arXiv 2503.09799 and 2501.18512; its bits for each param are a fit.
"""

import csv
import io
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.files import write_text

GRID = tuple(0.1 * 10 ** (4 * k / 49) for k in range(50))
"""Gbit/s: the bandwidths that the papers' tables have, a factor of 1.207 apart."""
FRAGMENT_LAYERS = 3
FOLDER = Path("data/published")
STEPS = 100  # of Streaming DiLoCo's table
MINUTES_OF_A_YEAR = 525_600
FAILURES = 20_000  # of a simulated learner
OVERLAP = {"streaming": (1 / 3, 1), "overlapped": (1.5, 1), "overlapped-fp4": (1.5, 4)}


class ModelOnLink(NamedTuple):
    """A model that trains: params, layers, seconds of a step, bits of a param on the link."""

    params: float
    layers: int
    step_seconds: float
    bits: float

    @property
    def layer_gigabits(self) -> float:
        """The gigabits of one layer's message."""
        return self.bits * self.params / self.layers / 1e9


def in_turn(model: ModelOnLink, steps: int, gigabits: float) -> float:
    """Return the share of `steps` steps and their message at a bandwidth in Gbit/s.

    CU = H T / max(H T, when the last layer has arrived). Data parallelism is one step.
    """
    total = steps * model.step_seconds
    backward = 2 * model.step_seconds / 3
    freed, link = total - backward, 0.0
    for _ in range(model.layers):
        freed += backward / model.layers
        link = max(link, freed) + model.layer_gigabits / gigabits
    return total / max(link, total)


def streaming(model: ModelOnLink, steps: int, gigabits: float, *, hidden: float) -> float:
    """Return the same where a fragment of three layers leaves at a time, once in `steps` steps.

    CU = H T / (H T + L / 3 * max(0, c - hidden T)), c the seconds of a fragment's message.

    Args:
      model: The model.
      steps: Steps between two messages of a fragment.
      gigabits: The bandwidth.
      hidden: Steps of training that hide a message: 1 / 3 without overlap, 1.5 with it.
    """
    total = steps * model.step_seconds
    message = FRAGMENT_LAYERS * model.layer_gigabits / gigabits
    waits = max(0.0, message - hidden * model.step_seconds)
    return total / (total + model.layers / FRAGMENT_LAYERS * waits)


def needed(share: Callable[[float], float], target: float) -> int:
    """Return the place in `GRID` of the least bandwidth of that share; its length if none."""
    return next((k for k, gigabits in enumerate(GRID) if share(gigabits) >= target), len(GRID))


def place(gigabits: float) -> int:
    """Return the place in `GRID` of a printed bandwidth."""
    return min(range(len(GRID)), key=lambda k: abs(GRID[k] - gigabits))


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


def table6(data: dict[str, Any]) -> Iterator[Cell]:
    """Yield the bandwidths of DiLoCo and data parallelism, arXiv 2503.09799."""
    for name, rows in data["table6"].items():
        model = _model(data, "table6", name)
        for steps, printed in rows.items():
            share = partial(in_turn, model, int(steps))
            yield from _bandwidths(
                "2503.09799 table 6", f"{name}, {_steps(int(steps))}", data, printed, share
            )


def table4(data: dict[str, Any]) -> Iterator[Cell]:
    """Yield the bandwidths of Streaming DiLoCo, arXiv 2501.18512."""
    for name, rows in data["table4"].items():
        model = _model(data, "table4", name)
        for method, printed in rows.items():
            share: Callable[[float], float]
            if method in OVERLAP:
                hidden, fewer = OVERLAP[method]
                smaller = model._replace(bits=model.bits / fewer)
                share = partial(streaming, smaller, STEPS, hidden=hidden)
            else:
                share = partial(in_turn, model, STEPS if method == "diloco" else 1)
            yield from _bandwidths("2501.18512 table 4", f"{name}, {method}", data, printed, share)


def goodput(data: dict[str, Any]) -> Iterator[Cell]:
    """Yield the goodput of Decoupled DiLoCo, arXiv 2604.21428, by a simulation of its failures."""
    table, minutes = data["goodput"], data["goodput"]["minutes"]
    rows = [("not elastic", 1, table["whole"])]
    for count, printed in table["learners"].items():
        name = "elastic data parallelism" if count == "1" else f"{count} learners"
        rows.append((name, int(count), printed))
    for row, learners, printed in rows:
        for chips, percent in zip(table["chips"], printed, strict=True):
            rate = chips / learners / MINUTES_OF_A_YEAR
            lost = minutes["whole"]
            if row != "not elastic":
                lost = minutes["a"] * rate ** -minutes["b"]
            ours = 100 * simulated(rate, lost, seed=0)
            cell = ("2604.21428 table 1, goodput", row, f"{chips:,.0f} chips")
            yield Cell(*cell, percent, ours, abs(ours - percent))


def simulated(rate: float, lost: float, seed: int) -> float:
    """Return the share of time that trains, from failures drawn: all times are exponential.

    Args:
      rate: Failures a minute.
      lost: Minutes that each costs, in the mean.
      seed: Of the draw.
    """
    rng = np.random.default_rng(seed)
    up = rng.exponential(1 / rate, FAILURES).sum()
    return float(up / (up + rng.exponential(lost, FAILURES).sum()))


def _steps(count: int) -> str:
    return "data parallelism" if count == 1 else f"{count} steps"


def _model(data: dict[str, Any], table: str, name: str) -> ModelOnLink:
    return ModelOnLink(**data["models"][name], bits=data["bits"][table][name])


def _bandwidths(
    table: str,
    row: str,
    data: dict[str, Any],
    printed: list[float],
    share: Callable[[float], float],
) -> Iterator[Cell]:
    for target, gigabits in zip(data["computes"], printed, strict=True):
        at, expected = needed(share, target), place(gigabits)
        ours = GRID[min(at, len(GRID) - 1)]
        yield Cell(table, row, f"{target:.0%}", gigabits, ours, abs(at - expected))


def cells() -> list[Cell]:
    """Return every cell of the three tables."""
    data = numbers()
    return [*table6(data), *table4(data), *goodput(data)]


def as_given(cell: Cell) -> str:
    """Return a published number as it is known; some are from summaries, and some are bounds."""
    if "goodput" in cell.table:
        return f"{cell.published:g} (summary)"
    return f"{cell.published:g}" + (" and more" if cell.published == GRID[-1] else "")


def markdown(all_cells: list[Cell]) -> Iterator[str]:
    """Yield a page: for each row what was published, and what our model has."""
    yield "# Published tables, and ours"
    yield ""
    for table in dict.fromkeys(cell.table for cell in all_cells):
        group = [cell for cell in all_cells if cell.table == table]
        columns = list(dict.fromkeys(cell.column for cell in group))
        exact = sum(cell.apart < 0.5 for cell in group)
        yield from ("", f"## arXiv {table}", "")
        unit = "points of percent" if "goodput" in table else "steps of the bandwidth grid"
        yield (
            f"Published, then ours. Of {len(group)} cells {exact} are equal as printed, and the "
            f"farthest is {max(cell.apart for cell in group):.2g} {unit} apart. The papers' "
            "figures are simulations too; ours have constants that were fitted to them."
        )
        yield from ("", f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}")
        for row in dict.fromkeys(cell.row for cell in group):
            values = [f"{as_given(c)} / {c.ours:.3g}" for c in group if c.row == row]
            yield f"| {row} | {' | '.join(values)} |"


def main() -> None:
    """Write the page and the cells."""
    all_cells = cells()
    write_text(FOLDER / "published.md", "\n".join(markdown(all_cells)) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*Cell._fields, "as_given"))
    writer.writerows((*cell, as_given(cell)) for cell in all_cells)
    write_text(FOLDER / "published.csv", text.getvalue())
    print(f"published: {FOLDER}: published.md, published.csv")


if __name__ == "__main__":
    main()
