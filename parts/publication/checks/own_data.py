"""A reader's own data of a published run: whether the author trained and measured on the same.

Whoever can read the data that the run file names makes them with `lockstep download`; those of the
default run need no network.
"""

from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from parts.publication import layout
from parts.publication.checks.claims import PublicClaim
from parts.publication.layout import Publication
from pipeline.audit import given_rows
from pipeline.language_model import held_out
from pipeline.start import begin
from pipeline.start.begin import Setup
from pipeline.weights import generation_config


def check(
    folder: Path, publication: Publication, setup: Setup, shards: Path, chosen: list[str]
) -> list[PublicClaim]:
    """Compare published sequences and tokenizer with what stage download left in `shards`.

    `chosen` names the rows of the windows that are repeated.

    Raises:
      LockstepError: Some are others.
    """
    run, model = setup.run, setup.model
    data, columns = begin.rows(run, model, shards), publication.columns
    for name in chosen:
        rows = given_rows.read(folder / name, columns, run, setup.subject.vocab_size(model))
        if rows.indices_N[-1] >= len(data):
            raise LockstepError(
                f"{name}: sequence {rows.indices_N[-1]}, expected one below {len(data)} as in "
                f"{shards}"
            )
        _compare(name, rows.rows_NW, data.take(rows.indices_N), shards)
    own = held_out.read(run, shards)
    if layout.HELD_OUT in publication.files or len(own.rows_NW):
        path = folder / layout.HELD_OUT
        rows = given_rows.read(path, columns, run, setup.subject.vocab_size(model))
        _compare(layout.HELD_OUT, rows.indices_N, own.indices_N, shards)
        _compare(layout.HELD_OUT, rows.rows_NW, own.rows_NW, shards)
    text = f"the sequences of {'these windows' if len(chosen) > 1 else 'this window'} and the "
    text += "held-out ones are those of the reader's data"
    return [PublicClaim("data", "proven", text), *_tokenizer(folder, publication, shards)]


def _compare(name: str, found_NW: np.ndarray, due_NW: np.ndarray, shards: Path) -> None:
    if not np.array_equal(found_NW, due_NW):
        raise LockstepError(f"{name}: other sequences than those of {shards}, expected the same")


def _tokenizer(folder: Path, publication: Publication, shards: Path) -> list[PublicClaim]:
    """Compare the tokenizer, which stage export copies from the data where these have one."""
    own, claims = shards / "tokenizer", []
    for name in publication.companions:
        if name == generation_config.NAME or not (own / name).is_file():
            continue
        if sha256_file(folder / name) != sha256_file(own / name):
            raise LockstepError(f"{name}: another than that of {shards}, expected the same")
        claims.append(PublicClaim(name, "proven", f"{name} is that of the reader's data"))
    return claims
