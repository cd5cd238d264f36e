"""A page that shows trainings side by side: losses, bytes, and where their run files differ."""

from collections.abc import Sequence
from typing import NamedTuple

from pipeline import runfile
from pipeline.pages import plots
from pipeline.pages.report import fill, flat, read_tsv
from pipeline.stage.artifacts import METRICS, Paths, read_json
from pipeline.stage.progress import size

TEMPLATE = "comparison.html.jinja"
LAST = 10  # the mean over a tenth of the rounds is a run's loss: one batch's is noise


class ComparedRun(NamedTuple):
    """A finished training.

    Attributes:
      name: What the page calls it.
      run: Its run file.
      rows: Its loss.tsv.
      trained: Its train.json.
    """

    name: str
    run: runfile.Run
    rows: list[dict[str, float]]
    trained: dict

    @classmethod
    def read(cls, name: str, paths: Paths) -> "ComparedRun":
        """Read what stage train left."""
        metrics = paths.out("train") / METRICS
        rows, trained = read_tsv(metrics / "loss.tsv"), read_json(metrics / "train.json")
        return cls(name, runfile.load(paths.run), rows, trained)

    @property
    def loss(self) -> float:
        """Mean training loss of the last tenth of the rounds, nats per token."""
        last = self.rows[-max(1, len(self.rows) // LAST) :]
        return sum(row["loss"] for row in last) / len(last)

    @property
    def numbers(self) -> dict[str, str]:
        """What the table at the top says of it."""
        trained, up = self.trained, self.trained["bytes_up"]
        return {
            "Loss, mean over the last tenth of the rounds": f"{self.loss:.3f}",
            "Rounds": f"{trained['rounds']:,}",
            "Tokens": f"{trained['tokens']:,}",
            "Parameters": f"{trained['parameters']:,}",
            "Sent per peer and round": size(up),
            "Bits per parameter and round": f"{trained['bits_per_parameter_and_round']:.3g}",
            "Sent per peer, all rounds": size(up * trained["rounds"]),
        }


def render(runs: Sequence[ComparedRun]) -> str:
    """Return the page."""
    return fill(
        TEMPLATE,
        title=" against ".join(run.name for run in runs),
        names=[run.name for run in runs],
        numbers=_side_by_side([run.numbers for run in runs]),
        pictures=plots.comparison_pictures({run.name: run.rows for run in runs}),
        differences=_differences([run.run for run in runs]),
    )


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a name, and each column's value."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _differences(runs: Sequence[runfile.Run]) -> list[tuple[str, list[str]]]:
    """The values of the run files that are not the same in all; one run has all its model's."""
    dumped = [run.model_dump(mode="json", exclude={"runtime"}) for run in runs]
    rows = _side_by_side([dict(flat(document, "")) for document in dumped])
    return [(name, values) for name, values in rows if len(runs) == 1 or len(set(values)) > 1]
