"""What a run trains: a language model, or what a part of Lockstep brings.

A part offers the joint "subject": its file `subject.py` has `SUBJECT`, a `Subject`. Nothing else
asks what kind of thing a run trains. A subject is trained, begins with params of its own if it
makes some (`Begins`), and is exported (`Exports`). None of these has state: each is told the run,
and the model, which is the table that a transcript's header has of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.columns import PLAIN, Column
from lockstep.programs.train_step import Programs
from pipeline.joints import Joint
from pipeline.language_model.held_out import HeldOutRows, MeanLoss
from pipeline.language_model.subject import LANGUAGE_MODEL
from pipeline.runfile import Run
from pipeline.tokens.shards import Shards
from pipeline.weights.exported import Exported
from pipeline.weights.model_folder import TrainedModel

Model = dict[str, Any]
"""The model of a transcript's header: a config.json, or whatever else describes it whole."""


class OpenedExport(Protocol):
    """An exported subject, read back to be measured."""

    texts: Exported | None  # the model as texts need it; None where it reads and writes none

    def held_out_loss(self, data: HeldOutRows) -> MeanLoss | None:
        """Return the subject's mean loss of held-out rows; None where it measures none."""

    def numbers(
        self, loss: MeanLoss, data: HeldOutRows, notes: list[str]
    ) -> dict[str, float | int | None]:
        """Return the numbers of evaluate.json that the subject's held-out loss gives.

        `notes` gains the reasons of what is unknown.
        """

    def own_metrics(self) -> dict[str, Any] | None:
        """Return what the subject's own code measures; None where it has no code of its own."""

    def close(self) -> None:
        """End the processes that compute the exported subject, if it has any."""


class Begins(Protocol):
    """First params that a subject makes itself, for a checkpoint without files."""

    def seed(self, run: Run) -> int:
        """Return the seed that the subject's first params are drawn with."""

    def first_params(self, run: Run, folder: Path) -> dict[str, Any]:
        """Write the subject's params.safetensors and `described_in`; return source.json's part."""

    def params_again(self, run: Run, model: Model) -> Tree:
        """Return the params that the subject's `first_params` made of this run."""


class Exports(Protocol):
    """The export of the subject that was trained."""

    model_file: str  # the file of an export that says what was trained
    card: Path | None  # template that fills blocks of the model card otherwise

    def export(self, run: Run, trained: TrainedModel, folder: Path) -> None:
        """Write the subject's export into a folder, without its card."""

    def export_weights(self, run: Run, model: Model, params: Tree, folder: Path) -> None:
        """Write only what the subject's `export` makes of the params: all can make it again."""

    def exported_params(self, model: Model, folder: Path) -> Tree:
        """Return the params of the subject's export."""

    def open_export(
        self, run: Run, model: Model, folder: Path, shards: Path | None = None
    ) -> OpenedExport:
        """Read the subject's export back, to be measured.

        `shards` is the folder that stage download left, in which rows may be names of files.
        """


class Subject(Protocol):
    """What a run trains, as all stages see it."""

    checkpoints: tuple[str, ...]  # the kinds of `model.LLM.checkpoint` that it can begin with
    begins: Begins | None  # None where each of these is files, or is drawn by stage convert
    exports: Exports
    described_in: str  # the file of data/init that describes it
    any_rows: bool  # whether it can be trained on rows that are not tokens
    loss_unit: str  # what a loss counts
    has_perplexity: bool  # whether the exponential of a loss is one
    draws: bool  # whether `[peers] seed` seeds randomness in its gradients
    memory_unknown: str  # why nobody can say what memory it needs; "" where it can be computed

    # ---- Which it is ----

    def trains(self, run: Run) -> bool:
        """Return whether a run file asks to train this subject."""

    def describes(self, model: Model) -> bool:
        """Return whether the model of a transcript's header is one of this subject."""

    def check_public(self, run: Run, where: object) -> None:
        """Check that others can repeat the subject from what is published, `where` in errors."""

    # ---- What it says of itself ----

    def read_model(self, run: Run, path: Path, listed: Shards | None) -> Model:
        """Return the subject's model, from `described_in` of data/init or an export's file.

        `listed` is what stage download left; None where there are no data yet, and nothing that is
        asked for depends on them.
        """

    def check_model(self, run: Run, model: Model, where: object) -> None:
        """Check that a stranger's model of the subject can be trained, `where` in errors."""

    def title(self, model: Model) -> str:
        """Return the name of the subject's model, for people."""

    def parameters(self, model: Model) -> int:
        """Return how many parameters of the subject are trained."""

    def vocab_size(self, model: Model) -> int | None:
        """Return the bound of token ids in the subject's data; None where rows have no bound."""

    def code(self, model: Model) -> str | None:
        """Return the SHA-256 of a user's code that computes the subject; None without such code."""

    def repeats(self, run: Run) -> bool:
        """Return whether the subject's step repeats bit for bit, or is to be refused."""

    def computed_by(self, run: Run, model: Model, environment: dict[str, str]) -> str:
        """Return what computes the gradients of the subject, for people."""

    # ---- How it is trained ----

    def extend(self, run: Run, earlier: Model, where: str, folder: Path) -> None:
        """Check that the subject can go on from an earlier run's params, `where` in errors."""

    def programs(
        self, run: Run, model: Model, first_step: int = 0, columns: tuple[Column, ...] = PLAIN
    ) -> Programs:
        """Return the programs of a run that trains the subject.

        `first_step` is the rounds trained by the run that this one extends, 0 for a new run.
        """

    def row_weights(
        self, programs: Programs, params: Tree, rows_NW: np.ndarray
    ) -> np.ndarray | None:
        """Return how much each row counts in the subject's mean loss, [N]; None if all alike."""

    def counted_rows(
        self, run: Run, model: Model, shards: Path
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the train rows without which no loss of the subject is measured, if any.

        Returns:
          Their indices, int64 [N] ascending, and the rows, int32 [N, W].
        """


class OffersSubject(Protocol):
    """A subject of a part: something else to train than a language model."""

    SUBJECT: Subject


SUBJECTS = Joint[OffersSubject]("subject")


def subject_of(run: Run) -> Subject:
    """Return the subject that a run trains."""
    return _first(lambda subject: subject.trains(run)) or LANGUAGE_MODEL


def check_language_model(run: Run, where: str) -> None:
    """Check that a run trains one of Lockstep's own models; errors call it `where`."""
    if subject_of(run) is not LANGUAGE_MODEL:
        raise LockstepError(
            f"{where}: trains a workload, expected a run of one of Lockstep's own models"
        )


def programs_of(
    run: Run, model: Model, first_step: int = 0, columns: tuple[Column, ...] = PLAIN
) -> Programs:
    """Return a run's programs, see `Subject.programs`."""
    return subject_of(run).programs(run, model, first_step, columns)


def subject_of_model(model: Model) -> Subject:
    """Return the subject that the model of a transcript's header is of."""
    return _first(lambda subject: subject.describes(model)) or LANGUAGE_MODEL


def _first(fits: Callable[[Subject], bool]) -> Subject | None:
    return next((part.SUBJECT for part in SUBJECTS if fits(part.SUBJECT)), None)
