"""What of a published run's held-out text is measured again."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.audit import given_rows
from pipeline.errors import LockstepError
from pipeline.programs import held_out
from pipeline.programs.held_out import HeldOutRows
from pipeline.publication import layout
from pipeline.publication.checks import results
from pipeline.publication.checks.results import Evaluated
from pipeline.publication.checks.weights import params_of
from pipeline.publication.layout import Publication
from pipeline.runfile.explain import validate_json
from pipeline.swarm.begin import Setup
from pipeline.tokens.columns import counted
from pipeline.transcript.transcript import Transcript
from pipeline.weights import exported
from pipeline.workload import export_folder
from pipeline.workload.choice import vocab_size


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
      sequences: How many sequences there are.
      different: How many of them differ from each other.
      asked: How many the run file asks for.
    """

    loss: float
    sequences: int
    different: int
    asked: int


def measure(
    folder: Path,
    publication: Publication,
    setup: Setup,
    transcript: Transcript,
    said: Evaluated,
) -> Measured | None:
    """Measure again what evaluate.json says of held-out text; None where nothing was held out.

    Raises:
      LockstepError: A number is another, or the sequences are not the first held-out ones.
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
    rows_NW, asked = _held_out_rows(folder, publication, setup), run.held_out.sequences
    if publication.is_workload:
        worker, params = setup.programs.worker, params_of(folder, transcript)
        size = run.peers.micro_batch
        loss = export_folder.held_out_loss(worker, params, rows_NW, size)
        results.compare_of_workload(said, loss, len(rows_NW))
    else:
        model = exported.read(folder, scan=run.peers.scan_layers)
        data = HeldOutRows(rows_NW, publication.columns)
        loss = held_out.exported_loss(model.features, model.head, model.params, data, run.peers)
        results.compare(said, loss, data, model.tokenizer)
    return Measured(loss, len(rows_NW), len(np.unique(rows_NW, axis=0)), asked)


def _held_out_rows(folder: Path, publication: Publication, setup: Setup) -> np.ndarray:
    columns, run, model = publication.columns, setup.run, setup.model
    rows = given_rows.read(folder / layout.HELD_OUT, columns, run, vocab_size(model))
    count, asked = len(rows.rows_NW), run.held_out.sequences
    if count > asked or rows.indices_N[-1] != count - 1:
        raise LockstepError(
            f"{layout.HELD_OUT}: {count} sequences up to {rows.indices_N[-1]}, expected at most "
            f"the first {asked}"
        )
    data = HeldOutRows(rows.rows_NW, columns)
    if not publication.is_workload and not counted(*data).any(axis=1).all():
        raise LockstepError(f"{layout.HELD_OUT}: a sequence without a prediction, expected none")
    return rows.rows_NW
