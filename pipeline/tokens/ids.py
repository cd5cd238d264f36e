"""Whether the numbers in token files are ids that a model has.

Shapes: N rows, L tokens of each, W = C * L numbers in a row of C columns.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import LockstepError
from pipeline.tokens.files import chunks
from pipeline.tokens.shards import PLAIN, Column, read_shards

LARGEST_LIMIT = 2**31  # no id that int32 cannot hold: it would come out negative
UNCOUNTED_LABEL = 2**32 - 100  # as labels of -100 are stored, which no loss counts
SCAN_TOKENS = 2**22
KINDS: dict[Column, str] = {
    "inputs": "token id",
    "labels": "label",
    "position_ids": "position id",
    "sequence_ids": "sequence id",
}


class Beyond(NamedTuple):
    """A number that may not stand where it does: place `column * L + token` of a row."""

    row: int
    place: int
    column: Column
    limit: int

    def error(self, where: str, number: np.integer, offset: int) -> LockstepError:
        return LockstepError(
            f"{where}: found {KINDS[self.column]} {number} at token {offset}, expected ids below "
            f"{self.limit}"
        )


class Ids(NamedTuple):
    """Which numbers may stand in a row: ids below the limit, where the column is one of ids."""

    limit: int
    columns: tuple[Column, ...] = PLAIN

    def beyond(self, rows_NW: np.ndarray) -> Beyond | None:
        """The first number that may not. Labels that no loss counts may."""
        if self.columns == PLAIN and np.maximum.reduce(rows_NW.reshape(-1)) < self.limit:
            return None  # nearly always, and at once
        rows_NCL, found = rows_NW.reshape(len(rows_NW), len(self.columns), -1), []
        for number, column in enumerate(self.columns):
            ids_NL = rows_NCL[:, number]
            limit = self.limit if column in ("inputs", "labels") else LARGEST_LIMIT
            beyond_NL = ids_NL >= limit
            if column == "labels":
                beyond_NL &= ids_NL != UNCOUNTED_LABEL
            if beyond_NL.any():
                row, token = np.argwhere(beyond_NL)[0].tolist()
                found.append(Beyond(row, number * ids_NL.shape[1] + token, column, limit))
        return min(found, default=None)


def limit_of(*vocab_sizes: int | None) -> int:
    """What every id has to lie below, of vocabularies that are known or not."""
    return min([LARGEST_LIMIT, *(size for size in vocab_sizes if size is not None)])


def check_file_ids(
    path: Path, token_size_in_bytes: int, vocab_size: int | None, name: str | None = None
) -> None:
    """Reads a whole file of tokens alone, and checks that each id lies below `vocab_size`.

    Args:
      path: the file.
      token_size_in_bytes: 2 or 4.
      vocab_size: None: below 2**31.
      name: what errors call the file; None: its path.

    Raises:
      LockstepError: the first id that does not, with its offset in tokens.
    """
    _check_file(path, token_size_in_bytes, Ids(limit_of(vocab_size)), 1, name or str(path))


def check_ids(folder: Path, vocab_size: int, max_seq_len: int | None = None) -> None:
    """Reads every token of a shards folder once: `check_file_ids` of each file that is in it.

    Those that are read while training are checked there. Of several columns, the inputs and labels
    are checked.

    Args:
      folder: the shards folder.
      vocab_size: of the model.
      max_seq_len: L, which only data of several columns needs.

    Raises:
      LockstepError: a token id is `vocab_size` or larger; names the file and the offset.
      ValueError: there are several columns and no `max_seq_len`.
    """
    shards = read_shards(folder)
    if shards.columns != PLAIN and max_seq_len is None:
        raise ValueError(f"max_seq_len is None, expected the length of columns {shards.columns}")
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
        if len(rows_NW) and (beyond := ids.beyond(rows_NW)):
            offset = beyond.row * width + beyond.place
            raise beyond.error(name, numbers_T[offset], start + offset)
        start += len(numbers_T)
