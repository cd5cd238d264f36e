"""Checks that the numbers in token files are ids of the vocabulary.

Shapes: N rows, L tokens of each, W = C * L numbers in a row of C columns.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import LockstepError
from lockstep.programs.columns import PLAIN, Column
from pipeline.tokens.files import chunks
from pipeline.tokens.shards import read_shards

LARGEST_LIMIT = 2**31  # beyond it, int32 would be negative
UNCOUNTED_LABEL = 2**32 - 100  # the label -100 as it is stored, which no loss counts
SCAN_TOKENS = 2**22
KINDS: dict[Column, str] = {
    "inputs": "token id",
    "labels": "label",
    "position_ids": "position id",
    "sequence_ids": "sequence id",
}


class InvalidId(NamedTuple):
    """A token id beyond its limit, at index `column * L + token` of a row."""

    row: int
    index: int
    column: Column
    limit: int

    def error(self, where: str, number: np.integer, offset: int) -> LockstepError:
        """Return the error of an invalid id: the id `number` at token `offset` of a file."""
        return LockstepError(
            f"{where}: found {KINDS[self.column]} {number} at token {offset}, expected ids below "
            f"{self.limit}"
        )


class Ids(NamedTuple):
    """The ids that may be in a row: those below the limit, in columns of ids."""

    limit: int
    columns: tuple[Column, ...] = PLAIN

    def first_invalid(self, rows_NW: np.ndarray) -> InvalidId | None:
        """Return the first id beyond its limit; labels that no loss counts are valid."""
        if self.columns == PLAIN and np.maximum.reduce(rows_NW.reshape(-1)) < self.limit:
            return None  # nearly always, and at once
        rows_NCL, invalid = rows_NW.reshape(len(rows_NW), len(self.columns), -1), []
        for number, column in enumerate(self.columns):
            ids_NL = rows_NCL[:, number]
            limit = self.limit if column in ("inputs", "labels") else LARGEST_LIMIT
            beyond_NL = ids_NL >= limit
            if column == "labels":
                beyond_NL &= ids_NL != UNCOUNTED_LABEL
            if beyond_NL.any():
                row, token = np.argwhere(beyond_NL)[0].tolist()
                invalid.append(InvalidId(row, number * ids_NL.shape[1] + token, column, limit))
        return min(invalid, default=None)


def limit_of(*vocab_sizes: int | None) -> int:
    """Return the bound of every id, given vocabulary sizes; None is unknown."""
    return min([LARGEST_LIMIT, *(size for size in vocab_sizes if size is not None)])


def check_file_ids(path: Path, token_size_in_bytes: int, vocab_size: int | None, name: str) -> None:
    """Check that each id in a file of tokens is below `vocab_size`, or below 2**31."""
    _check_file(path, token_size_in_bytes, Ids(limit_of(vocab_size)), 1, name)


def check_ids(folder: Path, vocab_size: int, max_seq_len: int) -> None:
    """Check the ids in each file of a shards folder; remote files are checked while training.

    If a row has several columns of `max_seq_len` numbers, its inputs and labels are checked. Rows
    that are not tokens have none.
    """
    shards = read_shards(folder)
    if shards.rows is not None:
        return
    width = 1 if shards.columns == PLAIN else len(shards.columns) * max_seq_len
    ids = Ids(limit_of(vocab_size), shards.columns)
    for file in shards.files:
        if file.is_here:
            path, name = folder / file.path, file.label(folder)
            _check_file(path, shards.token_size_in_bytes, ids, width, name)


def _check_file(path: Path, token_size_in_bytes: int, ids: Ids, width: int, name: str) -> None:
    start = 0
    for numbers_T in chunks(path, f"<u{token_size_in_bytes}", -(-SCAN_TOKENS // width) * width):
        rows_NW = numbers_T[: len(numbers_T) // width * width].reshape(-1, width)
        if len(rows_NW) and (invalid := ids.first_invalid(rows_NW)):
            offset = invalid.row * width + invalid.index
            raise invalid.error(name, numbers_T[offset], start + offset)
        start += len(numbers_T)
