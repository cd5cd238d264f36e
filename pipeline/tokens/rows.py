"""What a row of a run's data is: tokens, the arrays of an example, or a file by its hash.

A row is W words of 4 bytes, whatever it is: so arrays and files are shuffled, held out, assigned
and audited as tokens are. The bytes of a row of arrays are those of each array in the stated order,
little-endian and in C order, each with zeros after it up to a multiple of 4 bytes. A row of a file
is the SHA-256 of its content.

Shapes: N rows, W words in each, B = 4 W bytes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import ml_dtypes  # noqa: F401 - NumPy then knows bfloat16 by its name
import numpy as np
from pydantic import Field, model_validator

from lockstep.programs.columns import Column
from lockstep.tables.table import Table, wrong

WORD = 4  # bytes
MOST_WORDS = 2**24  # of a row, which is read into memory
ARRAY_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
FILES = "files"  # folder of the shards folder, where a file has its hash as its name

Dtype = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]


class TokenRows(Table):
    """Rows of tokens: one column after the other."""

    kind: Literal["tokens"] = "tokens"
    columns: tuple[Column, ...]
    """Columns of a row, in order."""
    length: Annotated[int, Field(ge=1)]
    """Numbers of each column."""

    @property
    def words(self) -> int:
        """W, the words of a row of tokens."""
        return len(self.columns) * self.length


class RowArray(Table):
    """One of the arrays of a row."""

    name: Annotated[str, Field(pattern=ARRAY_NAME)]
    """Name of the array."""
    dtype: Dtype
    """Dtype of its values, little-endian."""
    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=16)]
    """Its shape in one row; () is a single value."""

    @property
    def size(self) -> int:
        """Number of values in a row's array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of a row's array in bytes."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        """Size of a row's array in words, with the zeros after it."""
        return -(-self.nbytes // WORD)


class ArrayRows(Table):
    """Rows of arrays."""

    kind: Literal["arrays"] = "arrays"
    arrays: Annotated[tuple[RowArray, ...], Field(min_length=1)]
    """The arrays of a row, in order."""

    @property
    def words(self) -> int:
        """W, the words of a row of arrays."""
        return sum(array.words for array in self.arrays)

    @model_validator(mode="after")
    def _fits_together(self) -> "ArrayRows":
        if len({array.name for array in self.arrays}) < len(self.arrays):
            raise wrong("arrays", "no name twice")
        if self.words > MOST_WORDS:
            raise wrong("arrays", f"at most {MOST_WORDS} words of {WORD} bytes in a row")
        return self

    def places(self) -> Iterator[tuple[RowArray, int]]:
        """Yield each array of a row, and where its bytes begin in it."""
        offset = 0
        for array in self.arrays:
            yield array, offset
            offset += WORD * array.words


class FileRows(Table):
    """Rows of files: the SHA-256 of each, which is its name in a folder too."""

    kind: Literal["files"] = "files"
    folder: str
    """The folder; in shards.json, that in the shards folder."""

    @property
    def words(self) -> int:
        """W, the words of a row that is a file."""
        return 8


AnyRows = Annotated[ArrayRows | FileRows, Field(discriminator="kind")]  # that are not tokens


def encode(rows: ArrayRows, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return arrays [N, ...], each of its dtype and shape, as rows: uint32 [N, W]."""
    count = len(arrays[rows.arrays[0].name])
    bytes_NB = np.zeros((count, WORD * rows.words), np.uint8)
    for array, offset in rows.places():
        values = np.ascontiguousarray(arrays[array.name], array.dtype)  # little-endian on hosts
        flat = values.reshape(count, array.size).view(np.uint8)
        bytes_NB[:, offset : offset + array.nbytes] = flat
    return bytes_NB.view("<u4")


def described(rows: ArrayRows | FileRows) -> str:
    """Return a few words on what a row of a run's data is: its arrays, or a file."""
    if isinstance(rows, FileRows):
        return "the SHA-256 of a file"
    return ", ".join(f"{array.name} {array.dtype} {list(array.shape)}" for array in rows.arrays)
