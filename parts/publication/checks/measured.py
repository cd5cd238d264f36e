"""Measures a published run's held-out text again."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import LockstepError
from lockstep.programs.columns import counted
from lockstep.tables.explain import validate_json
from lockstep.transcript.transcript import Transcript
from parts.publication import layout
from parts.publication.checks import results
from parts.publication.checks.results import Evaluated
from parts.publication.layout import Publication
from pipeline.audit import given_rows
from pipeline.language_model import held_out
from pipeline.language_model.held_out import HeldOutRows
from pipeline.start.begin import Setup


def read_evaluated(folder: Path) -> Evaluated:
    """Read evaluate.json of a publication.

    Raises:
      LockstepError: It is not as stage evaluate writes it.
    """
    return validate_json(Evaluated, (folder / layout.EVALUATED).read_bytes(), layout.EVALUATED)


class Measured(NamedTuple):
    """What was measured on the published held-out sequences.

    Attributes:
      loss: Nats per token.
      stderr: Its standard error; None of a single sequence.
      sequences: How many sequences there are.
      different: How many of them differ from each other.
      asked: How many the run file asks for.
      split_sequences: How many the whole split has, as the author says.
    """

    loss: float
    stderr: float | None
    sequences: int
    different: int
    asked: int
    split_sequences: int


def measure(
    folder: Path,
    publication: Publication,
    setup: Setup,
    transcript: Transcript,
    said: Evaluated,
) -> Measured | None:
    """Measure again what evaluate.json says of held-out text; None where nothing was held out.

    Raises:
      LockstepError: A number is another, or the sequences are not those that the run's seed draws.
    """
    run = setup.run
    if transcript.header.held_out_loss is None:
        for name, value in said.held_out.items():
            if value is not None:
                raise LockstepError(
                    f"{layout.EVALUATED}: {name} is {value}, expected null, since nothing was held "
                    "out in training"
                )
        return None
    if layout.HELD_OUT not in publication.files:
        raise LockstepError(f"{layout.HELD_OUT}: no such file, expected the held-out sequences")
    data = _held_out_rows(folder, publication, setup, said.split_sequences)
    if transcript.header.held_out_rows != (len(data.rows_NW), data.split_size):
        raise LockstepError(
            f"{layout.EVALUATED}: {len(data.rows_NW)} of {data.split_size} sequences, expected "
            f"{transcript.header.held_out_rows} as in the transcript's header"
        )
    with closing(setup.subject.open_export(run, transcript.header.model, folder)) as opened:
        loss = opened.held_out_loss(data)
        if loss is None:
            raise LockstepError(
                f"{layout.EVALUATED}: held_out_loss is {said.held_out_loss}, expected null of a "
                "workload that measures no rows"
            )
        results.compare(said, loss, data, opened)
    different = len(np.unique(data.rows_NW, axis=0))
    asked = run.held_out.sequences
    return Measured(*loss, len(data.rows_NW), different, asked, data.split_size)


def _held_out_rows(
    folder: Path, publication: Publication, setup: Setup, split_size: int | None
) -> HeldOutRows:
    """Return the published rows: those that the seed draws from a split of the size as stated.

    Where rows have labels, those in which nothing counts are missing, and so may be others.
    """
    columns, run, model = publication.columns, setup.run, setup.model
    rows = given_rows.read(folder / layout.HELD_OUT, columns, run, setup.subject.vocab_size(model))
    if split_size is None:
        raise LockstepError(f"{layout.EVALUATED}: split_sequences is null, expected a number")
    due_N = held_out.spread(split_size, run.held_out.sequences, run.peers.seed)
    missing = len(np.setdiff1d(due_N, rows.indices_N))
    other = len(np.setdiff1d(rows.indices_N, due_N))
    if other or (missing and "labels" not in columns):
        raise LockstepError(
            f"{layout.HELD_OUT}: {missing} sequences missing and {other} others, expected the "
            f"{len(due_N)} of {split_size} that the run's seed draws"
        )
    data = HeldOutRows(rows.rows_NW, columns, rows.indices_N, split_size)
    if not publication.is_workload and not counted(data.rows_NW, columns).any(axis=1).all():
        raise LockstepError(f"{layout.HELD_OUT}: a sequence without a prediction, expected none")
    return data
