"""A comparison for people and programs, in data/compare/: Markdown, a page, CSV, JSON and plots."""

import base64
import csv
import io
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from lockstep.errors import shown
from lockstep.files import write_bytes, write_json, write_text
from parts.comparison.compare_file import Compare
from parts.comparison.ended import TRAINED
from parts.comparison.plan_file import name_of, table_path
from parts.comparison.results_table import (
    Row,
    conclusions,
    failure_costs,
    made_of,
    plain_rows,
    record,
    row_pairs,
    tables,
)
from pipeline.pages.templates import fill

CSV = (".csv", ".seeds.csv", ".pairs.csv", ".curves.csv", ".search.csv")
ENDINGS = (".md", ".html", ".json", ".png", *CSV)
OF_A_SEED = ("loss", "held_out_stderr", "tokens", TRAINED, "simulated_seconds", "key", "params")
TEMPLATE = "methods.html.jinja"
PANELS = (
    ("tokens", "tokens, all peers together", EngFormatter(""), 1),
    ("bytes_up", "sent by each peer", EngFormatter("B"), 1),
    (TRAINED, "simulated hours, training and links", StrMethodFormatter("{x:g}"), 3600),
)
# those of Okabe and Ito that colour-blind readers tell apart on white; then dashes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
FONT = {"font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False}  # "$" in a label


def write(file: Path, compare: Compare, table: Sequence[Row], code: str) -> list[Path]:
    """Write the table in each form, and the plots; return the files.

    They are named for the comparison's `file`; `code` stands for the code that trained, for people.
    """
    records = [record(compare, row, table) for row in table]
    compared = row_pairs(compare, table) + failure_costs(table)
    pairs = [{**pair._asdict(), "told_apart": pair.told_apart} for pair in compared]
    results = list(_results(compare, table))
    seeds = [names | {name: seed.get(name) for name in OF_A_SEED} for names, seed in results]
    curves = [names | measure for names, seed in results for measure in seed.get("curve", ())]
    search = [
        {"method": row.method, "training": number, **one}
        for row in plain_rows(table)
        for number, one in enumerate(row.found.tried, start=1)
    ]
    png = draw(plain_rows(table))
    files = [table_path(file, ending) for ending in ENDINGS]
    write_text(files[0], "\n".join(markdown(compare, table, code)) + "\n")
    plots = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    text, last = [*tables(compare, table)], [*conclusions(compare, table)]
    made = made_of(compare, table, code)
    page = fill(TEMPLATE, made_of=made, plots=plots, tables=text, conclusions=last)
    write_text(files[1], page)
    written = {"file": name_of(file), "code": code, "rows": records, "seeds": seeds, "pairs": pairs}
    write_json(files[2], written | {"search": search})
    write_bytes(files[3], png)
    for path, content in zip(files[4:], (records, seeds, pairs, curves, search), strict=True):
        write_text(path, as_csv(content))
    return files


def _results(compare: Compare, table: Sequence[Row]) -> Iterator[tuple[dict[str, Any], dict]]:
    """Yield the name and the result of each training, one for each row and seed."""
    for row in table:
        for number, seed in zip(compare.seeds, row.seeds, strict=True):
            yield {"method": row.method, "failure": row.failure, "seed": number}, seed


def markdown(compare: Compare, table: Sequence[Row], code: str) -> Iterator[str]:
    """Yield the lines of the tables for people, and the conclusions from them."""
    yield shown(made_of(compare, table, code))
    for heads, rows in tables(compare, table):
        yield ""
        yield f"| {' | '.join(map(_cell, heads))} |"
        yield f"|{'---|' * len(heads)}"
        for row in rows:
            yield f"| {' | '.join(map(_cell, row))} |"
    yield ""
    for line in conclusions(compare, table):
        yield f"- {shown(line)}"


def _cell(text: str) -> str:
    """Return a cell's text, which starts no other cell and steers no terminal."""
    return shown(text).replace("|", r"\|")


def as_csv(records: Sequence[dict[str, Any]]) -> str:
    """Return records as CSV, with a column for each name that any of them has."""
    text = io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


# ---- The plots ----


def draw(table: Sequence[Row]) -> bytes:
    """Return three plots as PNG, legible at 830 pixels: loss by tokens, by bytes and by hours.

    A line is the mean of a method's seeds, its band all of them. It has a number at its end, beside
    which the first plot has the method's name.
    """
    rows = [row for row in table if not math.isinf(row.mean)]
    height = max(3.2, 0.19 * len(rows))  # of the first plot, in inches, a line for each name
    with matplotlib.style.context(["default", FONT]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label: a box stands for it
        figure = Figure(figsize=(8.3, height + 3.2), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subfigures(2, 1, height_ratios=(height, 3.2))
        plots = [upper.subplots(), *lower.subplots(1, 2, sharey=True)]
        names = [_panel(axes, rows, *panel) for axes, panel in zip(plots, PANELS, strict=True)]
        for axes in plots[:2]:
            axes.set_ylabel("held-out loss, nats per token")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # names are moved apart in pixels
        for numbers in names:
            _move_apart(numbers)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _panel(
    axes: Axes, rows: Sequence[Row], column: str, title: str, ticks: Any, divisor: float
) -> list[Annotation]:
    """Draw the methods' lines by a column; return what names each at its end."""
    names = [_line(axes, number, row, column, divisor) for number, row in enumerate(rows)]
    axes.set_xlabel(title)
    if column != "tokens":
        _logarithmic(axes)
    axes.xaxis.set_major_formatter(ticks)
    axes.grid(color="#e3e6ec")
    axes.spines[["top", "right"]].set_visible(False)
    # cut at the middle of their first losses: the ends are what is compared
    firsts = [statistics.fmean(seed["curve"][1]["loss"] for seed in row.seeds) for row in rows]
    if rows:
        axes.set_ylim(top=max(statistics.median(firsts), *(row.mean for row in rows)) + 0.1)
    return names


def _line(axes: Axes, number: int, row: Row, column: str, divisor: float) -> Annotation:
    # without the one before the first round, and as many of each seed
    curves = [*zip(*(seed["curve"][1:] for seed in row.seeds), strict=False)]
    x_M = np.array([[p[column] for p in measures] for measures in curves], np.float64).mean(axis=1)
    loss_SM = np.array([[p["loss"] for p in measures] for measures in curves], np.float64).T
    x_M /= divisor
    color, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    axes.plot(x_M, loss_SM.mean(axis=0), ls=dashes, color=color, lw=1.6)
    axes.plot(x_M[-1], row.mean, "o", color=color, ms=4)
    axes.fill_between(x_M, loss_SM.min(axis=0), loss_SM.max(axis=0), color=color, alpha=0.15, lw=0)
    name, x, of = f"{number + 1}", 12.0, "offset points"
    if column == "tokens":  # of which all have nearly the same at their ends
        name, x, of = f"{name}  {row.label}", 1.0, "axes fraction"
    style: dict[str, Any] = {
        "textcoords": (of, "offset points"),
        "va": "center",
        "bbox": {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0},
        "arrowprops": {"arrowstyle": "-", "color": color, "lw": 0.6, "relpos": (0, 0.5)},
    }
    return axes.annotate(name, (x_M[-1], row.mean), (x, 0), **style)


def _logarithmic(axes: Axes) -> None:
    """Make x logarithmic, and at least a decade wide, so that a tick with a label is on it."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())  # or it labels all within a decade
    left, right = axes.get_xlim()
    half = max(right / left, 10.0) ** 0.5
    axes.set_xlim((left * right) ** 0.5 / half, (left * right) ** 0.5 * half)


def _move_apart(names: Sequence[Annotation]) -> None:
    """Move names up until none lies on one below it, or on the end of a line."""
    ends = [name.axes.transData.transform(name.xy) for name in names]
    taken = [Bbox([end - 10, end + 10]) for end in ends]
    for name in sorted(names, key=lambda name: name.xy[1]):
        # of the text alone: its thread always comes from the end
        while any(Text.get_window_extent(name).overlaps(other) for other in taken):
            name.xyann = name.xyann[0], name.xyann[1] + 1
            name.update_positions(name.figure.canvas.get_renderer())
        taken.append(Text.get_window_extent(name))
