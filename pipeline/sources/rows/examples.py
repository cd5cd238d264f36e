"""Arrays of examples, wherever they are: checked, and written as rows.

Nothing is whole in memory: arrays are taken a slice of examples at a time, in their order.

Shapes: N examples, n some of them, W words of a row.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.machine.progress import Progress
from lockstep.tables.explain import validate
from pipeline.runfile.data import Limit
from pipeline.sources.provider import HELD_OUT, TRAIN
from pipeline.sources.rows.writing import (
    RowShards,
    counts_of,
    held_out_rows,
    most_rows,
)
from pipeline.tokens.rows import NAME, WORD, ArrayRows, Dtype, encode
from pipeline.tokens.shards import ShardFile, Split

CHUNK_WORDS = 2**20  # that are read at once, and at least a row
DTYPES = get_args(Dtype)


class Sliced(Protocol):
    """An array that gives slices of its first axis: NumPy's, or one of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""

    def __getitem__(self, examples: slice) -> Any:
        """Return the values of these examples; slices may have to follow one another."""


class Examples(NamedTuple):
    """Examples: the form of a row, the number of examples, and how to read them.

    Attributes:
      name: where they are from, for errors.
      rows: what a row is.
      count: N.
      opened: opens the arrays, by name.
    """

    name: str
    rows: ArrayRows
    count: int
    opened: Callable[[], AbstractContextManager[Mapping[str, Sliced]]]


class WrittenArrays(NamedTuple):
    """Shards of arrays.

    Attributes:
      files: the shards.
      rows: what a row is.
      counts: rows of each split that were written.
    """

    files: tuple[ShardFile, ...]
    rows: ArrayRows
    counts: dict[Split, int]


def examples_of(
    name: str, opened: Callable[[], AbstractContextManager[Mapping[str, Sliced]]]
) -> Examples:
    """Describe examples by what their arrays say of themselves; no values are read.

    Raises:
      LockstepError: no array is there, their lengths differ, or an array has a name or a
        dtype that rows cannot have.
    """
    with opened() as arrays:
        rows, count = describe(arrays, name)
    return Examples(name, rows, count, opened)


def in_memory(name: str, arrays: Mapping[str, Sliced]) -> Examples:
    """Describe examples in arrays that are here already; see `examples_of`."""
    return examples_of(name, lambda: nullcontext(arrays))


def describe(arrays: Mapping[str, Sliced], where: str) -> tuple[ArrayRows, int]:
    """Return what a row of these arrays is, in the order of their names, and how many there are.

    Raises:
      LockstepError: see `examples_of`.
    """
    listed, counts = [], {}
    for name in sorted(arrays):
        array = arrays[name]
        if not re.fullmatch(NAME, name):
            raise LockstepError(
                f"{where}: lists an array named {brief(repr(name))}, expected at most 64 of the "
                "letters A to z, digits, _, - and ."
            )
        dtype, (count, *shape) = np.dtype(array.dtype), array.shape or (None,)
        if dtype.name not in DTYPES:
            kind = "Python objects" if dtype.hasobject else dtype
            raise LockstepError(
                f"{where}: array {name} is of {kind}, expected one of {', '.join(DTYPES)}"
            )
        if count is None or 0 in shape:
            raise LockstepError(
                f"{where}: array {name} has shape {list(array.shape)}, expected an axis of the "
                "examples, and a value of each"
            )
        if not count:
            raise LockstepError(f"{where}: array {name} has no rows, expected some")
        listed.append({"name": name, "dtype": dtype.name, "shape": tuple(shape)})
        counts[name] = count
    if not listed:
        raise LockstepError(f"{where}: found no arrays, expected some")
    first, *others = counts
    for name in others:
        if counts[name] != counts[first]:
            raise LockstepError(
                f"{where}: array {name} has {counts[name]} rows, expected {counts[first]} as "
                f"{first} has"
            )
    return validate(ArrayRows, {"arrays": tuple(listed)}, where), counts[first]


def same_rows(given: Mapping[Split, Sequence[Examples]], where: str) -> ArrayRows:
    """Return what a row of all these examples is.

    Raises:
      LockstepError: no row is there to train on, or two differ in dtype or shape; names its file.
    """
    if not given.get(TRAIN):
        raise LockstepError(f"{where}: found no arrays to train on, expected some")
    first = given[TRAIN][0]
    for examples in (one for some in given.values() for one in some):
        if examples.rows != first.rows:
            expected = {array.name: array for array in first.rows.arrays}
            found = {array.name: array for array in examples.rows.arrays}
            name = min(n for n in found | expected if found.get(n) != expected.get(n))
            raise LockstepError(
                f"{examples.name}: array {name} is {_said(found.get(name))}, expected "
                f"{_said(expected.get(name))} as in {first.name}"
            )
    return first.rows


def write_arrays(
    folder: Path,
    given: Mapping[Split, Sequence[Examples]],
    where: str,
    *,
    held_out_percent: float | None = None,
    limit: Limit | None = None,
    progress: Callable[..., Progress],
) -> WrittenArrays:
    """Write examples as shards.

    Args:
      folder: an empty folder.
      given: the examples of each split, one after the other.
      where: the data location, for errors.
      held_out_percent: share of the train examples to hold out, where no others are given for that.
      limit: of rows to keep; None for all.
      progress: see `FetchOptions`.

    Raises:
      LockstepError: a split has no row, rows differ, or a value is no finite number.
    """
    rows = same_rows(given, where)
    counts_of(
        {s: sum(one.count for one in some) for s, some in given.items()}, held_out_percent, where
    )
    shards = RowShards(folder, rows.words, most_rows(limit, rows.words, where))
    total = sum(one.count for some in given.values() for one in some)
    with progress(total=total * WORD * rows.words, unit="byte") as bar:
        for split, some in given.items():
            number, wanted = 0, (split,) if held_out_percent is None else (TRAIN, HELD_OUT)
            for rows_NW in _read(some):
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
    return WrittenArrays(shards.done(), rows, dict(shards.rows))


def _read(some: Sequence[Examples]) -> Iterator[np.ndarray]:
    """Yield the rows of some examples, a few at a time: uint32 [n, W]."""
    for examples in some:
        with examples.opened() as arrays:
            size = max(1, CHUNK_WORDS // examples.rows.words)
            for start in range(0, examples.count, size):
                stop = min(start + size, examples.count)
                taken = {}
                for array in examples.rows.arrays:
                    values = np.asarray(arrays[array.name][start:stop])
                    _check_values(values, f"{examples.name}: array {array.name}", start)
                    taken[array.name] = values
                yield encode(examples.rows, taken)


def _check_values(values: np.ndarray, where: str, first: int) -> None:
    """Check that numbers are finite, and that a bool has one of its two values.

    Raises:
      LockstepError: one is not; names its row.
    """
    if values.dtype == np.bool_:
        valid, expected = values.view(np.uint8) < 2, "0 or 1"
    elif values.dtype.kind in "iu":
        return
    else:
        with np.errstate(invalid="ignore"):  # of bfloat16 one NaN raises it
            valid, expected = np.isfinite(values), "a finite number"
    if not valid.all():
        place = tuple(np.argwhere(~valid)[0])
        plain = values.view(np.uint8) if values.dtype == np.bool_ else values
        raise LockstepError(
            f"{where}: found {plain[place]} in row {first + place[0]}, expected {expected}"
        )


def _said(array: Any) -> str:
    return "missing" if array is None else f"{array.dtype} {list(array.shape)}"
