"""Rows that are not tokens, checked and written as shards, and which of them are held out.

Arrays of examples are taken a slice at a time, in their order: nothing is whole in memory.

Where a percentage is, the held-out rows are spread evenly over all rows, by their number alone:
row i is held out if floor((i + 1) p / 100) > floor(i p / 100). A limit takes the first of the rows
that there are without it; then about HELD_OUT_TOKENS words are held out at most.

Shapes: N rows or examples, n some of them, W words of 4 bytes in a row.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.tables.validation import validate
from pipeline.runfile.data import Limit
from pipeline.sources.provider import HELD_OUT, TRAIN, FetchOptions
from pipeline.sources.token_files.listing import max_tokens
from pipeline.tokens.rows import ARRAY_NAME, WORD, ArrayRows, Dtype, encode
from pipeline.tokens.shards import ShardFile, Split, write_shard

SHARD_WORDS = 2**22  # about, of a file
CHUNK_WORDS = 2**20  # of arrays that are read at once, and at least a row
DTYPES = get_args(Dtype)


class RowShards:
    """Shards of rows in an empty folder, as they are written a few after another.

    The first `most` rows of each split are kept; None keeps all.
    """

    def __init__(self, folder: Path, words: int, most: Mapping[Split, int | None]):
        self._folder, self._most = folder, most
        self._per_shard = max(1, SHARD_WORDS // words)
        self._waiting: dict[Split, list[np.ndarray]] = {TRAIN: [], HELD_OUT: []}
        self._files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
        self.rows: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}  # so far

    def add(self, split: Split, rows_NW: np.ndarray) -> None:
        """Write little-endian rows to a split's shards."""
        if (most := self._most[split]) is not None:
            rows_NW = rows_NW[: most - self.rows[split]]
        if not len(rows_NW):
            return
        self.rows[split] += len(rows_NW)
        self._waiting[split].append(rows_NW)
        if sum(map(len, self._waiting[split])) >= self._per_shard:
            self._write(split)

    def is_full(self, splits: Iterable[Split]) -> bool:
        """Return whether more written rows of these splits would be dropped."""
        return all(self.rows[split] == self._most[split] for split in splits)

    def finish(self) -> tuple[ShardFile, ...]:
        """Write the rows that are left; return all files of shards."""
        for split, waiting in self._waiting.items():
            if waiting:
                self._write(split)
        return tuple(file for files in self._files.values() for file in files)

    def _write(self, split: Split) -> None:
        numbers, files = np.concatenate(self._waiting[split]), self._files[split]
        self._waiting[split] = []
        files.append(write_shard(self._folder, split, len(files), numbers))


# ---- Arrays of examples ----


ArraysByName = Callable[[], Mapping[str, np.ndarray]]  # mapped anew, so that few are at a time


class Examples(NamedTuple):
    """Examples to write as rows: where they are from, how many there are, and how to read them."""

    name: str
    rows: ArrayRows
    count: int
    arrays: ArraysByName


def examples_of(name: str, arrays: ArraysByName) -> Examples:
    """Describe examples by what their arrays say of themselves; no values are read.

    Raises:
      LockstepError: no array is there, their lengths differ, or an array has a name or a
        dtype that rows cannot have.
    """
    found = arrays()
    specs = {key: _check_array(key, found[key], name) for key in sorted(found)}
    if not specs:
        raise LockstepError(f"{name}: found no arrays, expected some")
    (first, (count, _)), *others = specs.items()
    for key, (other, _) in others:
        if other != count:
            raise LockstepError(
                f"{name}: array {key} has {other} rows, expected {count} as {first} has"
            )
    listed = tuple(spec for _, spec in specs.values())
    return Examples(name, validate(ArrayRows, {"arrays": listed}, name), count, arrays)


def _check_array(name: str, array: np.ndarray, where: str) -> tuple[int, dict[str, Any]]:
    """Return how many examples' rows an array has, and what it is in a row."""
    if not re.fullmatch(ARRAY_NAME, name):
        raise LockstepError(
            f"{where}: lists an array named {brief(repr(name))}, expected at most 64 of the "
            "letters A to z, digits, _, - and ."
        )
    dtype, (count, *shape) = array.dtype, array.shape or (None,)
    if dtype.name not in DTYPES:
        kind = "Python objects" if dtype.hasobject else dtype
        raise LockstepError(
            f"{where}: array {name} is of {kind}, expected one of {', '.join(DTYPES)}"
        )
    if count is None or 0 in shape:
        raise LockstepError(
            f"{where}: array {name} has shape {list(array.shape)}, expected a leading axis of "
            "examples, with at least one value for each"
        )
    if not count:
        raise LockstepError(f"{where}: array {name} has no rows, expected some")
    return count, {"name": name, "dtype": dtype.name, "shape": tuple(shape)}


def same_rows(splits: Mapping[Split, Sequence[Examples]], where: str) -> ArrayRows:
    """Return the form of a row, which all these examples share."""
    if not splits.get(TRAIN):
        raise LockstepError(f"{where}: found no arrays to train on, expected some")
    first = splits[TRAIN][0]
    for group in (g for groups in splits.values() for g in groups):
        if group.rows != first.rows:
            expected = {array.name: array for array in first.rows.arrays}
            actual = {array.name: array for array in group.rows.arrays}
            name = min(n for n in actual | expected if actual.get(n) != expected.get(n))
            specs = [
                f"{array.dtype} {list(array.shape)}" if array else "missing"
                for array in (actual.get(name), expected.get(name))
            ]
            raise LockstepError(
                f"{group.name}: array {name} is {specs[0]}, expected {specs[1]} as in {first.name}"
            )
    return first.rows


def write_arrays(
    folder: Path,
    splits: Mapping[Split, Sequence[Examples]],
    where: str,
    held_out_percent: float | None,
    options: FetchOptions,
) -> RowShards:
    """Write examples of the same rows as shards to an empty folder.

    `held_out_percent` is the share of the train examples to hold out, where no others are given for
    that; `where` is the data location, for errors.

    Raises:
      LockstepError: a split has no row, or a value is no finite number.
    """
    words = splits[TRAIN][0].rows.words
    counts = {split: sum(group.count for group in groups) for split, groups in splits.items()}
    counts_of(counts, held_out_percent, where)
    shards = RowShards(folder, words, most_rows(options.limit, words, where))
    total = sum(counts.values()) * WORD * words
    with options.progress(total=total, unit="byte") as bar:
        for split, groups in splits.items():
            number, wanted = 0, (split,) if held_out_percent is None else (TRAIN, HELD_OUT)
            for rows_NW in _read(groups):
                if held_out_percent is None:
                    shards.add(split, rows_NW)
                else:
                    held_out_N = held_out_rows(number, len(rows_NW), held_out_percent)
                    shards.add(TRAIN, rows_NW[~held_out_N])
                    shards.add(HELD_OUT, rows_NW[held_out_N])
                number += len(rows_NW)
                bar.advance(rows_NW.nbytes)
                if shards.is_full(wanted):
                    break
        bar.advance(bar.total - bar.done)
    return shards


def _read(groups: Sequence[Examples]) -> Iterator[np.ndarray]:
    """Yield the rows to write of groups of examples, a few at a time: uint32 [n, W]."""
    for group in groups:
        arrays, size = group.arrays(), max(1, CHUNK_WORDS // group.rows.words)
        for start in range(0, group.count, size):
            slices = {}
            for array in group.rows.arrays:
                values = np.asarray(arrays[array.name][start : start + size])
                _check_values(values, f"{group.name}: array {array.name}", start)
                slices[array.name] = values
            yield encode(group.rows, slices)


def _check_values(values: np.ndarray, where: str, first: int) -> None:
    """Check that a row's numbers are finite, and that a bool has one of its two values."""
    if values.dtype.kind in "iu":
        return
    if values.dtype == np.bool_:
        plain = values.view(np.uint8)
        valid, expected = plain < 2, "0 or 1"
    else:
        with np.errstate(invalid="ignore"):  # a NaN of bfloat16 raises it
            plain, valid, expected = values, np.isfinite(values), "a finite number"
    if not valid.all():
        place = tuple(np.argwhere(~valid)[0])
        raise LockstepError(
            f"{where}: found {plain[place]} in row {first + place[0]}, expected {expected}"
        )


# ---- Which rows ----


def held_out_rows(first: int, count: int, percent: float) -> np.ndarray:
    """Return which of the written rows from number `first` on are held out: bool [count]."""
    passed = np.floor(np.arange(first, first + count + 1) * percent / 100)
    return np.diff(passed) > 0


def counts_of(totals: Mapping[Split, int], percent: float | None, where: str) -> dict[Split, int]:
    """Return how many rows are written to each split, without a limit.

    `totals` are the rows by split; unless None, `percent` of the train rows are held out.

    Raises:
      LockstepError: both say what is held out, or one of the splits has no row.
    """
    train, held_out = totals.get(TRAIN, 0), totals.get(HELD_OUT, 0)
    if percent is not None and held_out:
        raise LockstepError(
            f"{where}: found {held_out} held-out rows in the data and held_out_percent = "
            f"{percent}, expected only one of the two"
        )
    if percent is not None:
        held_out = int(np.floor(np.float64(train) * percent / 100))
        if not 0 < held_out < train:
            raise LockstepError(
                f"{where}: held_out_percent = {percent} holds out {held_out} of {train} rows, "
                "expected one at least, and one to train on"
            )
        train -= held_out
    if not train:
        raise LockstepError(f"{where}: found no rows to train on, expected some")
    return {TRAIN: train, HELD_OUT: held_out}


def most_rows(limit: Limit | None, words: int, where: str) -> dict[Split, int | None]:
    """Return how many rows of W words are written within a limit; None for all.

    Raises:
      LockstepError: it is of sequences of another length, or allows no row.
    """
    if limit and limit.max_seq_len not in (None, words):
        raise LockstepError(
            f"download.limit.max_seq_len is {limit.max_seq_len}, expected {words}, the number of "
            f"words in a row of {where}"
        )
    most = {
        split: None if most is None else most // words for split, most in max_tokens(limit).items()
    }
    if most[TRAIN] == 0:
        raise LockstepError(
            f"download.limit.tokens is {limit.tokens}, expected at least {words}, the words of a "
            f"row of {where}"
        )
    if most[HELD_OUT] == 0:
        most[HELD_OUT] = 1
    return most


def warnings_of(counts: Mapping[Split, int], where: str, options: FetchOptions) -> tuple[str, ...]:
    """Return what a user should know of the splits of written rows."""
    if counts[HELD_OUT] or not options.measured:
        return ()
    return (f"{where}: neither held_out_percent nor held-out rows, so nothing is held out",)
