"""Stage download again: a reader's own data, if there are any, and the published sequences.

Whoever can read the data that the run file names makes them with `lockstep download`; those of the
default run need no network.
"""

from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.files import read_json, sha256_file
from lockstep.programs.columns import Column
from pipeline.audit import rows_file
from pipeline.language_model import held_out
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import COMPANIONS, HELD_OUT, PROOF, SHARDS
from pipeline.recheck.published import PublishedRun
from pipeline.start import set_up
from pipeline.tokens.shards import read_shards
from pipeline.tokens.tokenizer_files import GENERATION

STATED = PublicClaim("data", "stated", "where the sequences come from")


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Compare published sequences and tokenizer with what stage download left to the reader."""
    columns = published.setup.programs.task.columns
    _check_columns(read_json(published.folder / SHARDS).get("columns"), columns, SHARDS)
    if (shards := published.own.shards) is None:
        return [STATED]
    _check_columns(list(read_shards(shards).columns), columns, shards)
    run, model = published.run, published.setup.model
    bound = published.setup.subject.vocab_size(model)
    data = set_up.rows(run, model, shards)
    for name in published.rows:
        rows = rows_file.read(published.folder / name, columns, run, bound)
        if rows.indices_N[-1] >= len(data):
            raise LockstepError(
                f"{name}: has sequence {rows.indices_N[-1]}, expected numbers below {len(data)}, "
                f"the count in {shards}"
            )
        _compare(name, rows.rows_NW, data.take(rows.indices_N), shards)
    own = held_out.read(run, shards)
    if HELD_OUT in published.files or len(own.rows_NW):
        rows = rows_file.read(published.folder / HELD_OUT, columns, run, bound)
        _compare(HELD_OUT, rows.indices_N, own.indices_N, shards)
        _compare(HELD_OUT, rows.rows_NW, own.rows_NW, shards)
    text = f"the sequences of {'these windows' if len(published.rows) > 1 else 'this window'} and "
    text += "the held-out ones are those of the reader's data"
    return [PublicClaim("data", "proven", text), *_tokenizer(published, shards)]


def _check_columns(due: object, columns: tuple[Column, ...], where: str | Path) -> None:
    if due != list(columns):
        raise LockstepError(
            f"{PROOF}/publication.json: columns are {list(columns)}, expected "
            f"{brief(repr(due))} as in {where}"
        )


def _compare(name: str, found_NW: np.ndarray, due_NW: np.ndarray, shards: Path) -> None:
    if not np.array_equal(found_NW, due_NW):
        raise LockstepError(
            f"{name}: the sequences differ from those of {shards}, expected the same sequences"
        )


def _tokenizer(published: PublishedRun, shards: Path) -> list[PublicClaim]:
    """Compare the tokenizer, which stage export copies from the data where these have one."""
    own, claims = shards / "tokenizer", []
    for name in sorted(published.exported.keys() & set(COMPANIONS)):
        if name == GENERATION or not (own / name).is_file():
            continue
        if published.files[name] != sha256_file(own / name):
            raise LockstepError(
                f"{name}: differs from that file of the tokenizer in {shards}, expected the same"
            )
        claims.append(PublicClaim(name, "proven", f"{name} is that of the reader's data"))
    return claims
