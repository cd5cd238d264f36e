"""Published numbers and ours against each other, as PNG."""

import io
from collections.abc import Sequence
from typing import Protocol

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Compared(Protocol):
    """A number of a table, as published and as ours."""

    table: str
    published: float
    ours: float


def draw(cells: Sequence[Compared]) -> bytes:
    """Return a plot for each table: a point is a cell, the line is where both are equal."""
    tables = list(dict.fromkeys(cell.table for cell in cells))
    with matplotlib.style.context(["default", {"font.family": "DejaVu Sans", "font.size": 9}]):
        figure = Figure(figsize=(4.4 * len(tables), 4.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for table, axes in zip(tables, figure.subplots(1, len(tables)), strict=True):
            some = [cell for cell in cells if cell.table == table]
            published = [cell.published for cell in some]
            axes.plot(published, [cell.ours for cell in some], "o", ms=4, alpha=0.6)
            axes.axline((min(published),) * 2, (max(published),) * 2, color="#8a92a3", lw=1)
            percent = "goodput" in table
            if not percent:
                axes.set_xscale("log")
                axes.set_yscale("log")
            unit = "%" if percent else "Gbit/s"
            axes.set_title(f"arXiv {table}", loc="left")
            axes.set_xlabel(f"published, {unit}")
            axes.set_ylabel(f"ours, {unit}")
            axes.grid(color="#e3e6ec")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
