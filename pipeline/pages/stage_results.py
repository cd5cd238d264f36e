"""The results of a run, as its stages left them, for whoever shows them."""

import csv
import math
from pathlib import Path
from typing import NamedTuple

from lockstep.files import read_json
from pipeline.audit import verdict_text
from pipeline.stage.artifacts import METRICS
from pipeline.subject import Subject, subject_of_model

PAGE, CARD = "report.html", "README.md"


class Results(NamedTuple):
    """The results of a run: what stages train, witness and evaluate wrote."""

    header: dict  #: The transcript's header.json.
    trained: dict  #: metrics/train.json.
    verdict: dict  #: verdict.json.
    evaluated: dict = {}  #: evaluate.json; empty before stage evaluate.

    @property
    def held_out_loss(self) -> float | None:
        """The run's loss in nats per token, of the export or else of the training's end."""
        return self._last_measured["held_out_loss"]

    @property
    def measured_on(self) -> str | None:
        """The rows of the run's held-out loss, and its standard error; None if unknown."""
        if (rows := self.trained["held_out_rows"]) is None:
            return None
        return verdict_text.measured_on(self._last_measured["held_out_stderr"], *rows)

    @property
    def _last_measured(self) -> dict:
        measured = self.evaluated["held_out_loss"] is not None
        return self.evaluated if measured else self.trained

    @property
    def chance(self) -> float | None:
        """The run's loss of a uniform guess in nats per token, ln(vocabulary size); or None."""
        size = self._subject.vocab_size(self.header["model"])
        return None if size is None else math.log(size)

    @property
    def model_name(self) -> str:
        """The name of the run's trained model, for people."""
        return self._subject.title(self.header["model"])

    @property
    def unit(self) -> str:
        """The unit of the run's losses."""
        return self._subject.loss_unit

    @property
    def _subject(self) -> Subject:
        return subject_of_model(self.header["model"])

    @property
    def times_less(self) -> float:
        """Bytes of plain data parallelism over bytes that the run sent, per peer and round."""
        return self.trained["bytes_up_of_data_parallel"] / self.trained["bytes_up"]


def read(trained: Path, verdict: Path, evaluated: Path) -> Results:
    """Read the results of a run from the folders of the stages train, witness and evaluate."""
    return Results(
        read_json(trained / "transcript" / "header.json"),
        read_json(trained / METRICS / "train.json"),
        read_json(verdict / "verdict.json"),
        read_json(evaluated / "evaluate.json"),
    )


def read_tsv(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a stage's table of numbers, each by column name; None where unknown."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        {name: float(value) if value else None for name, value in line.items()}
        for line in csv.DictReader(lines, delimiter="\t")
    ]


def times(ratio: float) -> str:
    """Return a ratio of a run's results as text: 249 times, or 1.5 times if it is small."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
