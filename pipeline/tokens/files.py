"""Rows of numbers from token files: in the shards folder, remote, or all zeros.

Files of the folder are read, not mapped into memory. A mapped page counts as memory of the
process, and a kernel may map 2 MB around each page touched: shuffled rows of 1 GB of files would
soon be 1 GB of memory. And where a mapped file is cut short the process dies; here that is a
one-line error.

Shapes: N rows, n some of them, W numbers in each, F files.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError
from pipeline.net.origin import Origin
from pipeline.runfile import Network
from pipeline.tokens.shards import ZEROS, ShardFile

OPEN_FILES = 512  # a process may have about a thousand


class TokenFiles:
    """Token files, opened when first read; the last OPEN_FILES of them stay open."""

    def __init__(self, folder: Path, files: Sequence[ShardFile], row_bytes: int, network: Network):
        self._files, self._row_bytes = files, row_bytes
        self._is_here_F = np.array([file.is_here for file in files], bool)
        self._all_here = bool(self._is_here_F.all())
        is_zeros = [not file.is_here and file.origin.url == ZEROS for file in files]
        self._is_zeros_F = np.array(is_zeros, bool)
        self._is_far_F = ~(self._is_here_F | self._is_zeros_F)
        self.has_streams = bool(self._is_far_F.any())  # whether any file is remote
        if self.has_streams:
            from pipeline.net.transfers.stream import Streams

            self._streams = Streams(network)
        # No reference to self, so that files close with the last use and not at a collection.
        self._open = lru_cache(OPEN_FILES)(lambda number: _Opened(folder / files[number].path))

    def read(
        self, file_N: np.ndarray, start_N: np.ndarray, rows_NW: np.ndarray, in_order: bool
    ) -> None:
        """Fill `rows_NW`, contiguous little-endian integers, from files at offsets in bytes.

        `in_order` says whether most rows begin in their file where the one before ends.

        Raises:
          LockstepError: a file ends within a row, or cannot be read.
        """
        if self._all_here:
            self._read_here(file_N, start_N, rows_NW, in_order)
            return
        local = np.flatnonzero(self._is_here_F[file_N])
        if len(local):
            rows_nW = np.empty_like(rows_NW, shape=(len(local), rows_NW.shape[1]))
            self._read_here(file_N[local], start_N[local], rows_nW, in_order)
            rows_NW[local] = rows_nW
        rows_NW[self._is_zeros_F[file_N]] = 0
        streamed = np.flatnonzero(self._is_far_F[file_N])
        if len(streamed):
            contents = self._streams.read(self._ranges(file_N[streamed], start_N[streamed]))
            for row, content in zip(streamed.tolist(), contents, strict=True):
                rows_NW[row] = np.frombuffer(content, rows_NW.dtype)

    def expect(self, file_N: np.ndarray, start_N: np.ndarray) -> None:
        """Fetch remote rows of token files in the background."""
        is_far_N = self._is_far_F[file_N]
        if is_far_N.any():
            self._streams.expect(self._ranges(file_N[is_far_N], start_N[is_far_N]))

    def _ranges(self, file_N: np.ndarray, start_N: np.ndarray) -> list[tuple[Origin, int, int]]:
        """Return a range for each row, so that reading a row finds what was expected."""
        return [
            (self._files[number].origin, start, start + self._row_bytes)
            for number, start in zip(file_N.tolist(), start_N.tolist(), strict=True)
        ]

    def _read_here(
        self, file_N: np.ndarray, start_N: np.ndarray, rows_NW: np.ndarray, in_order: bool
    ) -> None:
        runs = rows_NW
        if in_order:
            follows_n = start_N[1:] - start_N[:-1] == self._row_bytes
            follows_n &= file_N[1:] == file_N[:-1]
            firsts = [0, *(np.flatnonzero(~follows_n) + 1).tolist()]
            runs = [rows_NW[a:b] for a, b in pairwise([*firsts, len(rows_NW)])]
            file_N, start_N = file_N[firsts], start_N[firsts]
        files, starts = file_N.tolist(), start_N.tolist()
        fds = list(map(self._open, files))  # references keep them open meanwhile
        # One system call for each run, in the fastest loop that Python has.
        if sum(map(os.preadv, fds, zip(runs), starts)) != rows_NW.nbytes:
            for number, run, start in zip(files, runs, starts, strict=True):
                self._read_whole(number, memoryview(run).cast("B"), start)

    def _read_whole(self, number: int, buffer: memoryview, start: int) -> None:
        """Read a run that came short: the file is short, or a call reads at most 2 GB."""
        fd, done = self._open(number), 0
        while done < len(buffer):
            count = os.preadv(fd, (buffer[done:],), start + done)
            if not count:
                size = os.fstat(fd).st_size
                raise LockstepError(
                    f"{fd.path}: {size} bytes, expected at least {start + len(buffer)}: it was "
                    "cut short while open"
                )
            done += count


class _Opened(int):
    """A token file's descriptor, which closes with its last reference."""

    path: Path

    def __new__(cls, path: Path) -> "_Opened":
        opened = super().__new__(cls, os.open(path, os.O_RDONLY))
        opened.path = path
        return opened

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)  # when the interpreter ends, `os` may be gone before this object


def chunks(path: Path, dtype: str, length: int) -> Iterator[np.ndarray]:
    """Yield a token file in arrays of `length` numbers, the last one shorter."""
    with open(path, "rb") as file:
        while len(chunk := np.fromfile(file, dtype, length)):
            yield chunk
