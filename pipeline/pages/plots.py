"""The report's plots, as PNG, drawn without a display; equal data give equal bytes."""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from lockstep.machine.progress import size
from pipeline.pages.stage_results import Results

SIZE, DPI = (5.6, 3.3), 160  # inches, whose text a phone still shows legibly; pixels per inch
MARKED = 60  # markers on more points than this would hide the line

INK, RULE = "#3b4252", "#e3e6ec"
# any two are told apart by colour-blind readers, on a dark page too (a test computes how well)
COLOURS = "#2968cf", "#a46500", "#29502a", "#000000", "#5899ff", "#de922a", "#6e0080", "#978e98"
HELD_OUT, ALARM, *_, TRAIN = COLOURS


class Axis(NamedTuple):
    """A plot's horizontal axis of the loss: a column of loss.tsv, times `scale`."""

    column: str
    title: str
    label: str
    scale: float
    ticks: Callable[[], EngFormatter | FuncFormatter]


def _with_commas() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:,.6g}")


BY_STEP = Axis("step", "By step", "step", 1, _with_commas)
BY_BYTES = Axis("bytes_up", "By bytes sent", "sent by each peer", 1, lambda: EngFormatter("B"))


def _by_time(seconds: float) -> Axis:
    """Return simulated time for a plot in a unit that suits the length of the run."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 3 * length:
            return Axis("seconds", "By simulated time", unit, 1 / length, _with_commas)
    return Axis("seconds", "By simulated time", "seconds", 1, _with_commas)


class Picture(NamedTuple):
    """A plot: its file name, title, alternative text and PNG."""

    name: str
    title: str
    alt: str
    png: bytes

    @property
    def uri(self) -> str:
        """The plot as an address that has all of its PNG."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def loss_pictures(
    results: Results, rows: list[dict], measured: list[dict], counted: tuple[str, int]
) -> list[Picture]:
    """Plot the loss in rows of loss.tsv and held_out.tsv by step, data, bytes and time.

    `counted` is the unit of the data, and its words (`LLM.counted`).
    """
    unit, words = counted
    by_data = Axis("tokens", f"By {unit}", f"{unit}, all peers together", 1 / words, EngFormatter)
    findings = results.verdict["findings"]
    caught = min((finding["round"] for finding in findings), default=None)
    parallel = results.trained["bytes_up_of_data_parallel"]
    # the bytes of plain data parallelism after one round, if they are near enough to be drawn
    near = rows[-1]["bytes_up"] / 20 < parallel < 2 * rows[-1]["bytes_up"]
    choices = [
        ("loss_by_step", BY_STEP, (caught, "first finding") if findings else None),
        (f"loss_by_{unit}", by_data, None),
        ("loss_by_bytes", BY_BYTES, (parallel, "one round of data parallelism") if near else None),
        ("loss_by_time", _by_time(rows[-1]["seconds"]), None),
    ]
    pictures = []
    for name, axis, mark in choices:
        first, last = rows[0]["loss"], rows[-1]["loss"]
        alt = f"Line plot: training loss goes from {first:.2f} to {last:.2f}"
        if measured:
            ends = measured[0]["held_out_loss"], measured[-1]["held_out_loss"]
            alt += f", held-out loss from {ends[0]:.2f} to {ends[1]:.2f}"
        end = f"{rows[-1][axis.column] * axis.scale:,.6g}"
        alt += f", {axis.title.lower()}, up to {end} {axis.label}."
        pictures.append(Picture(name, axis.title, alt, _loss(rows, measured, axis, mark)))
    return pictures


def learning_rate_picture(rows: list[dict]) -> Picture:
    """Plot the learning rate in rows of loss.tsv by step."""
    steps, rates = zip(*((row["step"], row["learning_rate"]) for row in rows), strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(steps, rates, color=HELD_OUT, lw=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))

    alt = f"Line plot: learning rate by step, {rates[0]:.3g} at first, at most {max(rates):.3g}, "
    alt += f"{rates[-1]:.3g} at the end."
    return Picture("learning_rate", "Learning rate by step", alt, _png(draw, SIZE))


def traffic_picture(results: Results) -> Picture:
    """Plot the bytes per peer and round, beside those of plain data parallelism."""
    trained = results.trained
    sizes = {
        "sent": trained["bytes_up"],
        "received": trained["bytes_down"],
        "sent by plain data parallelism": trained["bytes_up_of_data_parallel"],
    }
    # a lone peer receives nothing, and zero has no logarithm
    bars = [(name, count, size(count)) for name, count in sizes.items() if count]
    png = _png(partial(_traffic, bars), (SIZE[0], 0.9 + 0.42 * len(bars)))
    alt = "Bar plot, bytes per peer and round: "
    alt += "; ".join(f"{name} {label}" for name, _, label in bars) + "."
    return Picture("traffic", "Bytes per peer and round", alt, png)


def _loss(
    rows: Sequence[dict[str, float]],
    measured: Sequence[dict[str, float]],
    axis: Axis,
    mark: tuple[float, str] | None,
) -> bytes:
    """Plot training loss and held-out loss against one column, with a vertical line at `mark`."""
    markers = {"marker": "o", "ms": 3.5} if len(measured) <= MARKED else {}
    training_style = {"color": TRAIN, "lw": 1.2, "label": "training, mean over peers"}
    held_out_style = {"color": HELD_OUT, "lw": 2, "label": "held out"} | markers

    def draw(axes: Axes) -> None:
        for points, column, style in (
            (rows, "loss", training_style),
            (measured, "held_out_loss", held_out_style),
        ):
            if points:
                x = [row[axis.column] * axis.scale for row in points]
                axes.plot(x, [row[column] for row in points], **style)
        if mark:
            axes.axvline(mark[0], color=ALARM, lw=1.2, ls=(0, (4, 3)), label=mark[1])
        axes.set_xlabel(axis.label)
        axes.set_ylabel("loss (of text: nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=axis is BY_STEP))
        axes.xaxis.set_major_formatter(axis.ticks())
        axes.legend(framealpha=0.9, edgecolor="none", loc="upper right")

    return _png(draw, SIZE)


def _traffic(bars: Sequence[tuple[str, float, str]], axes: Axes) -> None:
    """Plot bars (name, bytes, label) on a logarithmic scale, relative to the last one."""
    names, sizes, labels = zip(*bars, strict=True)
    colours = [HELD_OUT] * (len(bars) - 1) + [TRAIN]
    axes.barh(names, sizes, color=colours, height=0.62)
    axes.set_xscale("log")
    low, high = min(sizes), max(sizes)
    axes.set_xlim(low / 5, high * (high / low * 5) ** 0.3)  # room for the labels
    axes.invert_yaxis()
    for row, (end, label) in enumerate(zip(sizes, labels, strict=True)):
        style = {"textcoords": "offset points", "va": "center", "color": INK}
        axes.annotate(label, (end, row), (5, 0), **style)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("bytes per peer and round (logarithmic)")
    axes.grid(axis="y", visible=False)


def _png(draw: Callable[[Axes], None], size: tuple[float, float]) -> bytes:
    """Return a plot's pair of axes as PNG, independent of matplotlibrc, time and versions."""
    settings = {
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": RULE,
        "grid.linewidth": 0.8,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 3,
        "xtick.minor.size": 0,
        "ytick.major.size": 0,
    }
    with matplotlib.style.context(["default", settings]):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
