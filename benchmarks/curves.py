"""Draws what `benchmarks.convergence` found: held-out loss by tokens and by bytes, as PNG."""

import io

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

PANELS = (("tokens", "tokens, all peers together", ""), ("bytes_up", "sent by each peer", "B"))


def draw(cases: list[dict]) -> bytes:
    """A row of plots for each size; a line is the mean over seeds, its band reaches from the lowest
    to the highest. Cases of a single seed stay in the table: a line without a band says too much.

    Args:
      cases: rows of convergence.json.
    """
    cases = [case for case in cases if case["trainings"]]  # not those that diverged
    several = [case for case in cases if len(case["trainings"]) > 1]
    sizes = list(dict.fromkeys(case["size"] for case in several or cases))
    names = list(dict.fromkeys(case["label"] for case in several or cases))
    with matplotlib.style.context(["default", {"font.family": "DejaVu Sans", "font.size": 9}]):
        figure = Figure(figsize=(10, 3.4 * len(sizes)), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(sizes), len(PANELS), squeeze=False)
        for size, row in zip(sizes, grid, strict=True):
            for axes, (column, title, unit) in zip(row, PANELS, strict=True):
                for case in several or cases:
                    if case["size"] == size:
                        _line(axes, case, column, names.index(case["label"]))
                axes.set_title(f"{size} parameters", loc="left")
                axes.set_xlabel(title)
                axes.set_ylabel("held-out loss, nats per token")
                if column == "bytes_up":
                    axes.set_xscale("log")
                axes.xaxis.set_major_formatter(EngFormatter(unit))
                axes.grid(color="#e3e6ec")
                axes.spines[["top", "right"]].set_visible(False)
        # above all panels: in one of them it would cover a curve's beginning; each case once
        lines = {line.get_label(): line for row in grid for line in row[0].get_lines()}
        figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, edgecolor="none")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _line(axes: object, case: dict, column: str, colour: int) -> None:
    place = ("tokens", "bytes_up").index(column)
    measures_SM3 = np.array([trained["held_out"] for trained in case["trainings"]], np.float64)
    x_M = measures_SM3[:, :, place].mean(axis=0)
    loss_SM = measures_SM3[:, :, 2]
    axes.plot(x_M, loss_SM.mean(axis=0), color=f"C{colour}", label=case["label"], lw=1.8)
    low, high = loss_SM.min(axis=0), loss_SM.max(axis=0)
    axes.fill_between(x_M, low, high, color=f"C{colour}", alpha=0.2, lw=0)
