"""A comparison for people and programs, in data/compare/: Markdown, a page, CSV, JSON and plots."""

import base64
import csv
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from lockstep.errors import shown
from lockstep.files import write_bytes, write_json, write_text
from parts.comparison.compare_file import Compare
from parts.comparison.plan_file import name_of, table_path
from parts.comparison.results_table import (
    Row,
    conclusions,
    failure_costs,
    front,
    made_of,
    plain_rows,
    record,
    row_pairs,
    tables,
)
from parts.comparison.train import TRAINED
from pipeline.pages.templates import fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

ENDINGS = (".md", ".html", ".json", ".png", ".csv", ".seeds.csv", ".pairs.csv", ".curves.csv")
OF_A_SEED = ("loss", "held_out_stderr", "tokens", TRAINED, "simulated_seconds", "key", "params")
TEMPLATE = "methods.html.jinja"
PANELS = (
    ("tokens", "tokens, all peers together", EngFormatter(""), 1),
    ("bytes_up", "sent by each peer", EngFormatter("B"), 1),
    (TRAINED, "simulated hours, training and links", StrMethodFormatter("{x:g}"), 3600),
)
FONT = {"font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False}  # "$" in a label
STYLE: list[str | dict[str, Any]] = ["default", FONT]


def write(file: Path, compare: Compare, table: Sequence[Row], code: str) -> list[Path]:
    """Write the table in each form, and the plots; return the files.

    They are named for the comparison's `file`; `code` stands for the code that trained, for people.
    """
    records = [record(compare, row, table) for row in table]
    compared = row_pairs(table) + failure_costs(table)
    pairs = [{**pair._asdict(), "told_apart": pair.sure} for pair in compared]
    results = list(_results(compare, table))
    seeds = [names | {name: seed.get(name) for name in OF_A_SEED} for names, seed in results]
    curves = [names | measure for names, seed in results for measure in seed.get("curve", ())]
    png = draw(plain_rows(table))
    files = [table_path(file, ending) for ending in ENDINGS]
    write_text(files[0], "\n".join(markdown(compare, table, code)) + "\n")
    write_text(files[1], page(compare, table, code, png))
    written = {"file": name_of(file), "code": code, "rows": records, "seeds": seeds, "pairs": pairs}
    write_json(files[2], written)
    write_bytes(files[3], png)
    for path, content in zip(files[4:], (records, seeds, pairs, curves), strict=True):
        write_text(path, _csv(content))
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


def page(compare: Compare, table: Sequence[Row], code: str, png: bytes) -> str:
    """Return the same in HTML, with the plots in it."""
    return fill(
        TEMPLATE,
        made_of=made_of(compare, table, code),
        plots=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        tables=list(tables(compare, table)),
        conclusions=list(conclusions(compare, table)),
    )


def _csv(records: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


# ---- The plots ----


def draw(table: Sequence[Row]) -> bytes:
    """Return a row of four plots: a line is the mean of a method's seeds, its band all of them.

    The fourth has each method's loss by its bytes, and the front that no other is below. Each
    method has a colour of its own, and its name at its point.
    """
    rows = [row for row in table if not math.isinf(row.mean)]
    colours = matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, len(rows)))
    with matplotlib.style.context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label: a box stands for it
        figure = Figure(figsize=(17, 5), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        *curves, last = figure.subplots(1, len(PANELS) + 1)
        for axes, (column, title, formatter, divisor) in zip(curves, PANELS, strict=True):
            for row, colour in zip(rows, colours, strict=True):
                _line(axes, row, column, divisor, colour)
            axes.set_xlabel(title)
            if column != "tokens":
                _logarithmic(axes)
            if column == TRAINED:  # of which there is seldom more than a decade or two
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(formatter)
        _front(last, rows, colours)
        for axes in (*curves, last):
            axes.grid(color="#e3e6ec")
            axes.spines[["top", "right"]].set_visible(False)
        curves[0].set_ylabel("held-out loss, nats per token")
        figure.draw_without_rendering()  # names are moved apart in pixels
        _name_points(last, rows, colours)
        handles, labels = curves[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, edgecolor="none")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _line(axes: "Axes", row: Row, column: str, divisor: float, colour: np.ndarray) -> None:
    curves = [seed["curve"][1:] for seed in row.seeds]  # without the one before the first round
    x_M = np.array([[p[column] for p in curve] for curve in curves], np.float64).mean(axis=0)
    loss_SM = np.array([[p["loss"] for p in curve] for curve in curves], np.float64)
    x_M /= divisor
    axes.plot(x_M, loss_SM.mean(axis=0), "-", color=colour, label=row.label, lw=1.7)
    axes.fill_between(x_M, loss_SM.min(axis=0), loss_SM.max(axis=0), color=colour, alpha=0.2, lw=0)


def _front(axes: "Axes", rows: Sequence[Row], colours: np.ndarray) -> None:
    for row, colour in zip(rows, colours, strict=True):
        axes.plot(row.total("bytes_up"), row.mean, "o", color=colour)
    points = sorted((row.total("bytes_up"), row.mean) for row in front(rows))
    axes.step(*np.reshape(points, (-1, 2)).T, where="post", color="#8a92a3", lw=1)
    _logarithmic(axes)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("sent by each peer, at the end; the front")


def _logarithmic(axes: "Axes") -> None:
    """Make x logarithmic, and at least a decade wide, so that a tick with a label is on it."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())  # or it labels all within a decade
    left, right = axes.get_xlim()
    half = max(right / left, 10.0) ** 0.5
    axes.set_xlim((left * right) ** 0.5 / half, (left * right) ** 0.5 * half)


def _name_points(axes: "Axes", rows: Sequence[Row], colours: np.ndarray) -> None:
    """Write each method's name beside its point, or above names that are already there."""
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6}
    taken: list[Bbox] = []
    for row, colour in zip(rows, colours, strict=True):
        point = row.total("bytes_up"), row.mean
        is_right = axes.transLimits.transform(axes.transScale.transform(point))[0] > 0.5
        side, x = ("right", -5) if is_right else ("left", 5)
        color = 0.65 * colour[:3]
        name = axes.annotate(row.label, point, (x, -2), ha=side, color=color, **style)
        while any(name.get_window_extent().overlaps(other) for other in taken):
            name.xyann = x, name.xyann[1] + 1
        taken.append(name.get_window_extent())
