"""A safetensors file, read and written piece by piece: a model may be larger than the memory.

The library reads and checks such a file, and maps it into memory, but it writes only tensors that
are all in memory at once. The bytes written here are those that it writes of the same tensors.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401 - NumPy then knows bfloat16 by its name
import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline.errors import LockstepError
from pipeline.stage.artifacts import written

# The file's names of dtypes and NumPy's. Tensors lie in a file from the last dtype to the first.
DTYPES = {
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
CODES = {name: code for code, name in DTYPES.items()}
ORDER = {code: -place for place, code in enumerate(DTYPES)}

PIECE = 2**21  # elements, 8 MiB of float32: they fit a processor's cache, and the calls are few
NARROWEST = 64  # columns read at once of a tensor to transpose: fewer read each page too often
TILE = 256  # a transposition in squares of this many rows and columns took a fifth of the time
BEHIND = 2  # pieces that wait to be written while the next is made
FLUSH = 2**28  # bytes between two flushes: else the disk stands still until the end
PADDING = 16  # elements after a row of a tile: rows a power of two apart share a cache's places


class Form(NamedTuple):
    """What a header says of a tensor: its dtype as the file names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(DTYPES[self.dtype]).itemsize


def form_of(dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> Form:
    """The form of a tensor of NumPy's `dtype`.

    Raises:
      ValueError: a safetensors file has no such dtype.
    """
    name = np.dtype(dtype).name
    if name not in CODES:
        raise ValueError(f"dtype {name}, expected one of {', '.join(CODES)}")
    return Form(CODES[name], tuple(shape))


# ---- Reading ----


class Reader(Mapping[str, np.ndarray]):
    """A file's tensors by name; one that is asked for is mapped into memory, and read when used.

    What was read of it leaves the memory with the array: who keeps none of them holds none.

    Args:
      path: of the file.

    Raises:
      LockstepError: it is no safetensors file, or a part of one.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="np"):  # checks all that the header says
                pass
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, SafetensorError) as error:
            raise LockstepError(f"{path}: expected a safetensors file: {error}") from error
        header.pop("__metadata__", None)
        self.forms = {n: Form(said["dtype"], tuple(said["shape"])) for n, said in header.items()}
        self.nbytes = sum(form.nbytes for form in self.forms.values() if form.dtype in DTYPES)
        self._starts = {n: 8 + length + said["data_offsets"][0] for n, said in header.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape = self.forms[name]
        if dtype not in DTYPES:
            raise LockstepError(f"{self.path}: {name} is {dtype}, expected {', '.join(DTYPES)}")
        if 0 in shape:  # of nothing there is no map
            return np.empty(shape, DTYPES[dtype])
        try:
            mapped = np.memmap(self.path, DTYPES[dtype], "r", self._starts[name], shape)
        except (OSError, ValueError) as error:
            raise LockstepError(f"{self.path}: {name}: {error}, expected to read it") from error
        return mapped.view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)


def pieces(array: np.ndarray, *, transposed: bool = False) -> Iterator[np.ndarray]:
    """Yields an array, or a matrix transposed, in C order and in contiguous pieces."""
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
    forms: Mapping[str, Form],
    pieces: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file whose tensors need never be in memory: whole or absent, at any kill.

    Args:
      path: of the file.
      forms: of the tensors, by name.
      pieces: returns a tensor's values by its name, in C order, in contiguous arrays of any shape.
        It is asked for each tensor once, in the order in which they lie in the file.
      metadata: of the file, for its readers.

    Raises:
      LockstepError: it could not be written.
      ValueError: the pieces of a tensor are not of its form.
    """
    ordered = sorted(forms, key=lambda name: (ORDER[forms[name].dtype], name))
    with written(path) as file, _Behind(file) as behind:
        behind.write(_header({name: forms[name] for name in ordered}, metadata))
        for name in ordered:
            left = forms[name].nbytes
            for piece in pieces(name):
                if piece.dtype != DTYPES[forms[name].dtype]:
                    raise ValueError(f"{name}: piece of {piece.dtype}, expected {forms[name]}")
                behind.write(piece.reshape(-1).view(np.uint8))
                left -= piece.nbytes
            if left:
                raise ValueError(f"{name}: pieces of {left} bytes less, expected {forms[name]}")


def _header(forms: dict[str, Form], metadata: Mapping[str, str] | None) -> bytes:
    """The header's length and the header, filled up with spaces as the format asks for."""
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, form in forms.items():
        start, end = end, end + form.nbytes
        table[name] = {
            "dtype": form.dtype,
            "shape": list(form.shape),
            "data_offsets": [start, end],
        }
    said = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    return len(said).to_bytes(8, "little") + said


class _Behind:
    """Writes to a file in a thread, a few pieces behind; another flushes it to the disk meanwhile.

    What the system refuses is raised by a later call, at the latest on leaving.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._unflushed = file, 0
        self._writer, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._flush: Future[None] | None = None

    def __enter__(self) -> "_Behind":
        return self

    def write(self, data: bytes | np.ndarray) -> None:
        if len(self._waiting) > BEHIND:
            self._waiting.popleft().result()
        self._waiting.append(self._writer.submit(self._write, data))

    def _write(self, data: bytes | np.ndarray) -> None:
        self._file.write(data)
        self._unflushed += len(data)
        if self._unflushed > FLUSH and (self._flush is None or self._flush.done()):
            self._check_flush()
            self._unflushed = 0
            self._flush = self._flusher.submit(os.fsync, self._file.fileno())

    def _check_flush(self) -> None:
        """The system says only once that the disk did not take what was written."""
        if self._flush is not None:
            self._flush.result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown(cancel_futures=kind is not None)
        self._flusher.shutdown()
        if kind is None:
            for last in self._waiting:
                last.result()
            self._check_flush()
