"""Rows of token ids in a parquet file, in the form of Psyche's Preprocessed data, checked.

Columns are lists of integers, all of one length:

    inputs            token ids
    labels            ids to predict; UNCOUNTED, -100, where the loss does not count them
    position_ids      positions, from 0 and below the row's length
    sequence_lengths  of any length: lengths of the sequences packed into the row; the rest of the
                      row is padding

All but `inputs` may be absent; other columns are ignored.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.programs.columns import UNCOUNTED
from pipeline import extras
from pipeline.stage.given_files import check_unpacked

if TYPE_CHECKING:
    from pyarrow import Array

ROW_TOKENS = 2**24  # at most, of a row, which is read into memory
LEAST_NUMBERS = 2**28  # that any row group may have; more only if its bytes are not too few
# A column of a file -> the column of the shards (columns.py), in the order of a row.
COLUMNS = {
    "inputs": "inputs",
    "labels": "labels",
    "position_ids": "position_ids",
    "sequence_lengths": "sequence_ids",
}


class Parquet:
    """A parquet file of rows.

    Attributes:
      columns: those of COLUMNS that it has.
      rows: number of rows.
      length: tokens of the first row; 0 without rows.

    Raises:
      LockstepError: it is not a parquet file, lacks a column, or has one of another type; or
        pyarrow is not installed.
    """

    def __init__(self, path: Path, name: str):
        extras.required(name, "pyarrow")
        from pyarrow import parquet

        self.name = name
        with self._one_line():  # names too are decoded only when they are asked for
            # mapped, or a whole row group would be read into memory, however large
            self._file = parquet.ParquetFile(path, memory_map=True)
            self.rows = self._file.metadata.num_rows
            self.columns = self._find_columns()
            self._check_size()
        self.length = self._first_length()

    @property
    def tokens(self) -> int:
        """Number of tokens, from the file's metadata."""
        with self._one_line():
            groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
            columns = [group.column(n) for group in groups for n in range(group.num_columns)]
            return sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] == "inputs")

    def read(
        self, length: int, vocab_size: int | None, rows: int, most: int | None
    ) -> Iterator[np.ndarray]:
        """Yield its rows, int64 [N, W]: their columns one after the other, as in columns.py.

        Args:
          length: expected tokens of each row.
          vocab_size: bound of the ids; None is 2**31.
          rows: N, except for the last.
          most: limit of the rows read; None is all.

        Raises:
          LockstepError: a row is invalid; names the column and the row, from 0.
        """
        done = 0
        with self._one_line():
            for batch in self._file.iter_batches(rows, columns=list(self.columns)):
                if most is not None:
                    batch = batch.slice(0, most - done)
                if not batch.num_rows:
                    break
                lists = [_Lists(self.name, c, batch.column(c), done) for c in self.columns]
                yield np.concatenate([_read(one, length, vocab_size) for one in lists], axis=1)
                done += batch.num_rows

    def _find_columns(self) -> tuple[str, ...]:
        """Return the columns that it has, after checking their types."""
        from pyarrow import types

        schema = self._file.schema_arrow
        columns = tuple(column for column in COLUMNS if column in schema.names)
        if "inputs" not in columns:
            found = brief(", ".join(schema.names)) or "none"
            raise LockstepError(f"{self.name}: found columns {found}, expected inputs among them")
        for column in columns:
            if schema.names.count(column) > 1:
                raise LockstepError(f"{self.name}: column {column} is there twice, expected once")
            kind = schema.field(column).type
            lists = types.is_list(kind) or types.is_large_list(kind)
            lists = lists or types.is_fixed_size_list(kind)
            if not (lists and types.is_integer(kind.value_type)):
                found = brief(str(kind))
                raise LockstepError(
                    f"{self.name}: column {column} is of {found}, expected lists of integers"
                )
        return columns

    def _check_size(self) -> None:
        """Check that no row is too long to be read, before any is: a few bytes may unpack to GB."""
        for number in range(self._file.num_row_groups):
            group = self._file.metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                if name in self.columns and column.num_values > ROW_TOKENS * group.num_rows:
                    raise LockstepError(
                        f"{self.name}: column {name} has {column.num_values} numbers in "
                        f"{group.num_rows} rows, expected at most {ROW_TOKENS} in a row"
                    )
                if name == "inputs":  # those of other columns may all be the same
                    sizes = (column.total_compressed_size, column.num_values)
                    check_unpacked(*sizes, f"{self.name}: column {name}", LEAST_NUMBERS)

    def _first_length(self) -> int:
        with self._one_line():
            for batch in self._file.iter_batches(1, columns=["inputs"]):
                first = _Lists(self.name, "inputs", batch.column("inputs"), 0)
                if not first.lengths[0]:
                    first.refuse(0, "an empty list", "token ids")
                return int(first.lengths[0])
        return 0

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Turn errors of the library into one line."""
        from pyarrow import ArrowException

        try:
            yield
        except (ArrowException, OSError, ValueError) as error:  # names that are not UTF-8, for one
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise LockstepError(
                f"{self.name}: {brief(line, 200)}, expected a parquet file"
            ) from error


def _read(lists: "_Lists", length: int, vocab_size: int | None) -> np.ndarray:
    """Return a column of rows: int64 [N, L]."""
    if lists.column == "sequence_lengths":
        return _sequence_ids(lists, length)
    lists.check_lengths(length)
    if lists.column == "position_ids":
        lists.check_values(length, f"a position from 0 and below the row's length, {length}")
    else:
        limit = vocab_size or 2**31
        expected, also = f"a token id from 0 and below {limit}", None
        if lists.column == "labels":
            expected, also = f"{UNCOUNTED} or {expected}", UNCOUNTED
        lists.check_values(limit, expected, also)
    return lists.values.reshape(-1, length).astype(np.int64)


def _sequence_ids(lists: "_Lists", length: int) -> np.ndarray:
    """Return each token's sequence number, from 0; padding has the one after the last."""
    lists.check_values(length + 1, f"a length from 0 to {length}, that of the row")
    # where each sequence ends, counted over all rows
    ends_S = np.cumsum(lists.values, dtype=np.int64)
    edges = np.concatenate([[0], ends_S])
    starts_N, stops_N = edges[lists.ends - lists.lengths], edges[lists.ends]
    wrong_N = stops_N - starts_N > length
    if wrong_N.any():
        row = int(np.argmax(wrong_N))
        found = f"lengths that sum to {stops_N[row] - starts_N[row]}"
        lists.refuse(row, found, f"at most {length}, that of the row")
    row_S = np.repeat(np.arange(len(lists.lengths)), lists.lengths)
    real_S = np.asarray(lists.values) > 0
    steps = np.zeros((len(lists.lengths), length + 1), np.int64)
    steps[row_S[real_S], (ends_S - starts_N[row_S])[real_S]] = 1
    return np.cumsum(steps, axis=1)[:, :length]


class _Lists:
    """Lists of integers of a column, `first` the row number of the first.

    Attributes:
      values, lengths, ends: all values, and the length and the end of each list.
    """

    def __init__(self, name: str, column: str, array: "Array", first: int):
        from pyarrow import compute

        self.name, self.column, self.first = name, column, first
        if array.null_count:
            row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            self.refuse(row, "null", "a list of integers")
        self.lengths = compute.list_value_length(array).to_numpy().astype(np.int64)
        self.ends = np.cumsum(self.lengths)
        values = array.flatten()
        if values.null_count:
            at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
            self.refuse(self._row_of(at), "null", "integers")
        self.values = values.to_numpy()

    def check_lengths(self, length: int) -> None:
        """Check that each list has this length."""
        wrong = self.lengths != length
        if wrong.any():
            row = int(np.argmax(wrong))
            found = f"{self.lengths[row]} numbers"
            self.refuse(row, found, f"{length} as the first row of inputs has")

    def check_values(self, limit: int, expected: str, also: int | None = None) -> None:
        """Check that each value is from 0 and below a limit, or is `also`."""
        wrong = (self.values < 0) | (self.values >= limit)
        if also is not None:
            wrong &= self.values != also
        if wrong.any():
            at = int(np.argmax(wrong))
            self.refuse(self._row_of(at), str(self.values[at]), expected)

    def refuse(self, row: int, found: str, expected: str) -> NoReturn:
        """Raise the error for a row."""
        raise LockstepError(
            f"{self.name}: column {self.column}, row {self.first + row}: found {found}, expected "
            f"{expected}"
        )

    def _row_of(self, at: int) -> int:
        return int(np.searchsorted(self.ends, at, side="right"))
