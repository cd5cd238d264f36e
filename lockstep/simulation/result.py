"""The result of a simulation: params, curves, a plot, and the curves' CSV files."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree

TRAIN = ("step", "loss", "examples", "applied", "bytes_up", "bytes_down", "link_seconds", "seconds")
VALIDATION = ("step", "loss", "local_loss", "averaged_loss")
CORRELATION = ("step", "correlation")
COLUMNS = {"train": TRAIN, "validation": VALIDATION, "correlation": CORRELATION}


@dataclass
class Curves:
    """The rows of each curve of a simulation so far, by the names of their columns."""

    train: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)
    correlation: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """A finished simulation. Params are trees like those that it began with, in float32.

    Attributes:
      params: The params that all peers agree on.
      local_params: Where each peer takes its next gradient: the params themselves, except with
        SPARTA, SPARTA-DiLoCo, Streaming DiLoCo and Decoupled DiLoCo, whose peers stay apart.
      curves: Rows by curve.
      micro_batch: Examples of one gradient computation.
      fired: How often each kind of fault changed something.
      ejected: The round and the reason, by peer, of those that were proven to lie.
    """

    params: Tree
    local_params: tuple[Tree, ...]
    curves: Curves
    micro_batch: int
    fired: dict[str, int]
    ejected: dict[int, tuple[int, str]]

    @property
    def train(self) -> dict[str, np.ndarray]:
        """A number for each simulated round, by name.

        step: The round, from 1.
        loss: Mean of the peers' losses, by what counts in them; NaN if nobody trained.
        examples: Examples of all messages applied since the start.
        applied: Messages that were applied.
        bytes_up, bytes_down: Bytes sent and received by a peer since the start, mean over peers.
        link_seconds: Seconds that rounds took on the simulated links since the start.
        seconds: Seconds that they took here.

        With local steps a peer's loss is the mean of its steps'.
        """
        return _columns(self.curves.train, TRAIN)

    @property
    def validation(self) -> dict[str, np.ndarray]:
        """A number for each measurement of `eval_data`, by name.

        step: The round that it followed; 0 is before the first.
        loss: Loss of the params that all agree on.
        local_loss: Loss of the first peer's local params.
        averaged_loss: Loss of the mean of all peers' local params.
        """
        return _columns(self.curves.validation, VALIDATION)

    @property
    def correlation(self) -> dict[str, np.ndarray]:
        """Pearson's correlation of simulated peers' local params, mean over pairs, by step."""
        return _columns(self.curves.correlation, CORRELATION)

    @property
    def bytes_per_peer(self) -> int:
        """Bytes that a simulated peer sent, mean over peers."""
        return round(self.curves.train[-1]["bytes_up"])

    def plot(self, path: str | Path) -> Path:
        """Draw the simulated losses by round and by bytes sent, in the format of the path's suffix.

        Returns:
          The path.
        """
        # a second to import, which few calls of `simulate` need
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

        path, train, measured = Path(path), self.train, self.validation
        if path.suffix.removeprefix(".") not in Figure().canvas.get_supported_filetypes():
            raise LockstepError(f"simulate: plot to {path}, expected a name such as loss.png")
        sent = dict(zip([0, *train["step"]], [0, *train["bytes_up"]], strict=True))
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        by_round, by_bytes = figure.subplots(1, 2, sharey=True)
        for axes, x, x_measured in (
            (by_round, train["step"], measured["step"]),
            (by_bytes, train["bytes_up"], [sent[step] for step in measured["step"]]),
        ):
            axes.plot(x, train["loss"], color="#86a3c6", label="training")
            if len(x_measured):
                axes.plot(x_measured, measured["loss"], color="#0b5cad", label="validation")
            axes.spines[["top", "right"]].set_visible(False)
        by_round.set(xlabel="round", ylabel="loss")
        by_bytes.set(xlabel="bytes sent by a peer")
        by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
        by_round.legend(frameon=False)
        figure.savefig(path)
        return path


class Log:
    """A simulation's result in the making: curves and CSV files, if any, written row by row.

    `settings` is what config.json holds.
    """

    def __init__(self, folder: Path | None, settings: dict):
        self.folder, self.settings, self.curves = folder, settings, Curves()

    def begin(self, curves: Curves) -> None:
        """Begin the curves with the rows of earlier rounds, if the simulation resumes."""
        self.curves = curves
        if self.folder is None:
            return
        text = json.dumps(self.settings, indent=2, default=str)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        for name, columns in COLUMNS.items():
            with open(self.folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(getattr(curves, name))

    def add(self, curve: str, row: dict) -> None:
        """Add a row to a curve of the simulation, and to its CSV file."""
        getattr(self.curves, curve).append(row)
        if self.folder:
            with open(self.folder / f"{curve}.csv", "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS[curve]).writerow(row)


def _columns(rows: list[dict], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    missing = {None: np.nan}
    return {name: np.array([missing.get(row[name], row[name]) for row in rows]) for name in names}
