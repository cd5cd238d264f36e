"""A safetensors file, read and written piece by piece: a model may be larger than the memory.

The library checks such a file, but it writes only tensors that are all in memory at once: of a
checkpoint that is stored transposed or in another dtype, that is the whole model. The bytes written
here are those that it writes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - NumPy then knows bfloat16 by its name
import numpy as np
from safetensors import SafetensorError, safe_open

from lockstep.errors import LockstepError, expecting
from lockstep.files import check_regular_file, once, written

# The file's names of dtypes and NumPy's. Tensors lie in a file from the last dtype to the first.
DTYPE_OF_CODE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
CODES = {name: code for code, name in DTYPE_OF_CODE.items()}
ORDER = {code: -index for index, code in enumerate(DTYPE_OF_CODE)}

PIECE = 2**21  # elements, 8 MiB of float32: they fit a processor's cache, and the calls are few
NARROWEST = 64  # columns read at once of a tensor to transpose: fewer read each page too often
TILE = 256  # rows and columns: a transposition in squares took a fifth of the time
PADDING = 16  # elements after a row of a tile, whose rows would else share lines of the cache


class TensorSpec(NamedTuple):
    """What a safetensors header says of a tensor."""

    dtype: str
    """Dtype, as the file names it."""
    shape: tuple[int, ...]
    """Shape."""

    @property
    def nbytes(self) -> int:
        """Size of a tensor's values in bytes, as its header has it."""
        return math.prod(self.shape) * np.dtype(DTYPE_OF_CODE[self.dtype]).itemsize


def spec_of(dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> TensorSpec:
    """Return a safetensors spec of a tensor of NumPy's `dtype`.

    Raises:
      ValueError: A safetensors file cannot hold that dtype.
    """
    name = np.dtype(dtype).name
    if name not in CODES:
        raise ValueError(f"dtype {name}, expected one of {', '.join(CODES)}")
    return TensorSpec(CODES[name], tuple(shape))


# ---- Reading ----


class TensorFile(Mapping[str, np.ndarray]):
    """The tensors of a file by name; each is mapped into memory when it is looked up.

    The memory is freed with the array.

    Raises:
      LockstepError: The file is not a safetensors file, or is truncated.
    """

    def __init__(self, path: Path):
        self.path = path
        check_regular_file(path)
        with expecting(path, "a safetensors file", OSError, SafetensorError, ValueError):
            with safe_open(path, framework="np"):  # checks the whole header
                pass
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length), object_pairs_hook=once)
        self.metadata = header.pop("__metadata__", None) or {}  # which may be null
        self.specs = {n: TensorSpec(t["dtype"], tuple(t["shape"])) for n, t in header.items()}
        self.nbytes = sum(
            spec.nbytes for spec in self.specs.values() if spec.dtype in DTYPE_OF_CODE
        )
        self._starts = {n: 8 + length + t["data_offsets"][0] for n, t in header.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape = self.specs[name]
        if dtype not in DTYPE_OF_CODE:
            raise LockstepError(
                f"{self.path}: {name} is {dtype}, expected {', '.join(DTYPE_OF_CODE)}"
            )
        with expecting(f"{self.path}: {name}", "to read it", OSError, ValueError):
            if 0 in shape:  # an empty range cannot be mapped
                return np.empty(shape, DTYPE_OF_CODE[dtype])
            mapped = np.memmap(self.path, DTYPE_OF_CODE[dtype], "r", self._starts[name], shape)
        return mapped.view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def pieces(array: np.ndarray, *, transposed: bool = False) -> Iterator[np.ndarray]:
    """Yield an array, or a transposed matrix, for a tensor file: in C order, piece by piece."""
    array = np.asarray(array)
    if not transposed:
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, PIECE):
            yield flat[start : start + PIECE]
        return
    # as plain integers: NumPy copies its own dtypes faster than those of ml_dtypes
    plain = array.view(f"u{array.itemsize}")
    height, width = array.shape
    count = max(NARROWEST, PIECE // max(1, height))
    for start in range(0, width, count):
        yield _transposed(plain[:, start : start + count]).view(array.dtype)


def _transposed(matrix: np.ndarray) -> np.ndarray:
    height, width = matrix.shape
    result = np.empty((width, height), matrix.dtype)
    buffer = np.empty((TILE, TILE + PADDING), matrix.dtype)
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            square = matrix[top : top + TILE, left : left + TILE]
            tile = buffer[: square.shape[0], : square.shape[1]]
            tile[...] = square
            result[left : left + TILE, top : top + TILE] = tile.T
    return result


# ---- Writing ----


def write(
    path: Path,
    specs: Mapping[str, TensorSpec],
    pieces: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file whose tensors need never be in memory; it is whole or absent, at any kill.

    `pieces` returns the values of a tensor by its name, in C order, in contiguous arrays of any
    shape. It is called once for each tensor, in the order in which they lie in the file.

    Raises:
      LockstepError: The file could not be written.
      ValueError: The pieces of a tensor do not fit its spec.
    """
    ordered = sorted(specs, key=lambda name: (ORDER[specs[name].dtype], name))
    with written(path) as file:
        file.write(_header({name: specs[name] for name in ordered}, metadata))
        for name in ordered:
            missing = specs[name].nbytes
            for piece in pieces(name):
                if piece.dtype != DTYPE_OF_CODE[specs[name].dtype]:
                    raise ValueError(f"{name}: piece of {piece.dtype}, expected {specs[name]}")
                file.write(piece.reshape(-1).view(np.uint8))
                missing -= piece.nbytes
            if missing:
                raise ValueError(f"{name}: {missing} bytes are missing, expected {specs[name]}")


def file_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the size of a safetensors file of tensors."""
    return len(_header(dict(specs), None)) + sum(spec.nbytes for spec in specs.values())


def _header(specs: dict[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Return a safetensors header's length and text, padded with spaces as the format requires."""
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.nbytes
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
