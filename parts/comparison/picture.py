"""The picture of a comparison: the held-out loss by tokens, and at the end by bytes sent."""

import io
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, NullFormatter
from matplotlib.transforms import Bbox

from parts.comparison.results_table import Row
from pipeline.pages.plots import COLOURS, RULE

TITLES = "Loss while it trains", "Loss at the end by bytes sent: best is low and to the left"
# of each row, beside its colour; dashes by turns, since lines that cross are mostly of neighbours
MARKERS, DASHES = "osD^vPX*", ("-", (0, (4, 1.5)))
LOOKS = [*zip(COLOURS, MARKERS, DASHES * 4, strict=True)]
LOOKS += [*zip(COLOURS, MARKERS[1:] + MARKERS[0], DASHES[::-1] * 4, strict=True)]
FONT = {"font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False}  # "$" in a label
HEIGHT, OF_A_NAME = 3.1, 0.2  # inches


def draw(table: Sequence[Row], peers: int, unit: str) -> bytes:
    """Return the comparison's picture, two plots as a PNG that is legible at 830 pixels.

    A row has the same colour, marker and name in both. Bands and bars are standard deviations of
    the seeds. Rows of which a seed diverged are left out.
    """
    rows = [row for row in table if not math.isinf(row.mean)]
    heights = max(HEIGHT, OF_A_NAME * len(rows)), HEIGHT
    with matplotlib.style.context(["default", FONT]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label: a box stands for it
        figure = Figure(figsize=(8.3, sum(heights)), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subfigures(2, 1, height_ratios=heights)
        plots = above.subplots(), below.subplots()
        for axes, title in zip(plots, TITLES, strict=True):
            axes.set_title(title, loc="left", size=10, weight="bold")
            axes.set_ylabel(f"held-out loss, {unit}")
            axes.grid(color=RULE)
            axes.spines[["top", "right"]].set_visible(False)
        below.supxlabel(_trained(rows, peers), size=8.5, x=0.01, ha="left")
        names = [_by_tokens(plots[0], rows), _by_bytes(plots[1], rows)]
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # names are moved apart in pixels
        for of_a_plot in names:
            _move_apart(of_a_plot)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _trained(rows: Sequence[Row], peers: int) -> str:
    """Return who trained what on how much, and what the picture shows of its seeds."""
    if not rows:
        return "No method has a loss."
    params, seeds = rows[0].first("parameters"), len(rows[0].seeds)
    ratio = statistics.median(row.first("tokens") for row in rows) / params
    shown = f"mean of {seeds} seeds ± one standard deviation" if seeds > 1 else "one seed"
    return f"{peers} peers, {params:,} parameters, {ratio:.2g} tokens a parameter; {shown}"


def _by_tokens(axes: Axes, rows: Sequence[Row]) -> list[Annotation]:
    """Draw the picture's curves by tokens; return the names beside their ends."""
    axes.set_xlabel("tokens, all peers together")
    axes.xaxis.set_major_formatter(EngFormatter(""))
    axes.margins(x=0.02)
    names = []
    for row, (color, marker, dashes) in zip(rows, itertools.cycle(LOOKS)):
        # without the measure before the first round, and as many of each seed
        curves = [*zip(*(seed["curve"][1:] for seed in row.seeds), strict=False)]
        tokens_M = [statistics.fmean(p["tokens"] for p in points) for points in curves]
        loss_MS = np.array([[p["loss"] for p in points] for points in curves], np.float64)
        mean_M = loss_MS.mean(axis=1)
        axes.plot(tokens_M, mean_M, ls=dashes, lw=1.6, color=color)
        axes.plot(tokens_M[-1], row.mean, marker, ms=5, color=color)
        if len(row.seeds) > 1:
            reach_M, band = loss_MS.std(axis=1, ddof=1), {"color": color, "alpha": 0.15, "lw": 0}
            axes.fill_between(tokens_M, mean_M - reach_M, mean_M + reach_M, **band)
        name = _name(axes, row, tokens_M[-1], color)
        name.xyann, name.anncoords = (1.0, 0), ("axes fraction", "offset points")
        names.append(name)
    if ends := [row.mean for row in rows]:  # which are compared: half of the height is theirs
        low, high = min(ends), max(ends)
        axes.set_ylim(low - 0.1 * (high - low) - 0.05, high + max(high - low, 0.5))
    return names


def _by_bytes(axes: Axes, rows: Sequence[Row]) -> list[Annotation]:
    """Draw the picture's ends by bytes, on a logarithmic axis; return the names beside them."""
    axes.set_xlabel("sent by each peer until the end (logarithmic)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # or it labels all within a decade
    sent = [row.total("bytes_up") for row in rows]
    least, most = min(sent, default=1), max(sent, default=1)
    room = max(1.5, math.sqrt(10 * least / most))  # at least a decade, in which a tick has a label
    axes.set_xlim(least / room, most * room)
    names = []
    for row, x, (color, marker, _) in zip(rows, sent, itertools.cycle(LOOKS)):
        axes.errorbar(x, row.mean, row.spread, fmt=marker, ms=6, capsize=3, lw=1.2, color=color)
        left = math.log(x / least) > 0.7 * math.log(most / least)  # where there is more room
        names.append(_name(axes, row, x, color, left))
    return names


def _name(axes: Axes, row: Row, x: float, color: str, left: bool = False) -> Annotation:
    """Write a row's name in the picture beside its end, joined to it by a thread."""
    style: dict[str, Any] = {"va": "center", "ha": "right" if left else "left"}
    style["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0}
    style["arrowprops"] = {"arrowstyle": "-", "color": color, "lw": 0.7, "relpos": (left, 0.5)}
    offset = (-14 if left else 14, 0)
    return axes.annotate(row.label, (x, row.mean), offset, textcoords="offset points", **style)


def _move_apart(names: Sequence[Annotation]) -> None:
    """Move the picture's names up until none lies on one below it, or on the end of a line."""
    ends = [name.axes.transData.transform(name.xy) for name in names]
    taken = [Bbox([end - 10, end + 10]) for end in ends]
    for name in sorted(names, key=lambda name: name.xy[1]):
        # of the text alone: its thread always comes from the end
        while any(Text.get_window_extent(name).overlaps(other) for other in taken):
            name.xyann = name.xyann[0], name.xyann[1] + 1
            name.update_positions(name.figure.canvas.get_renderer())
        taken.append(Text.get_window_extent(name))
