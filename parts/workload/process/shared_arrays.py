"""Arrays shared with a worker in a file that both processes map, so nothing is copied."""

import os
import secrets
import shutil
from pathlib import Path

import numpy as np

IN_MEMORY = Path("/dev/shm")  # a file system without a disk
SPARE = 2**27  # bytes that are left to others there


class SharedArrays:
    """Params, gradients and rows in a file, in memory if there is room.

    Attributes:
      params: float32 [parameters], what the worker computes at.
      gradients: float32 [parameters], what it writes.
      rows: int32, one row after the other.

    Args:
      folder: Where the file is if there is no room in memory.
      parameters: How many numbers the params have.
      row_bytes: Room for rows.
    """

    def __init__(self, folder: Path, parameters: int, row_bytes: int):
        self._folder, self._parameters = folder, parameters
        self._open(row_bytes)

    def grow_rows(self, row_bytes: int) -> None:
        """Make room for so many bytes of rows, in a new file; what was in the old one is lost."""
        self.forget()
        self._open(row_bytes)

    def request(self) -> dict:
        """Return the arguments of a worker's `open_arrays`: the path, and where each array is."""
        size = 4 * self._parameters
        return {
            "path": str(self._path),
            "params": [0, self._parameters],
            "gradients": [size, self._parameters],
            "rows": [2 * size, self.rows.nbytes],
        }

    def __enter__(self) -> "SharedArrays":
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Take the file's name away, once both have mapped it: so no kill leaves it behind."""
        self._path.unlink(missing_ok=True)

    def _open(self, row_bytes: int) -> None:
        row_words = max(1, -(-row_bytes // 4))
        total = 4 * (2 * self._parameters + row_words)
        in_memory = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > total + SPARE
        try:
            words = self._reserve(IN_MEMORY if in_memory else self._folder, total)
        except OSError:  # others took the room at the same time
            if not in_memory:
                raise
            words = self._reserve(self._folder, total)
        values = words[: 2 * self._parameters].view("<f4")
        self.params, self.gradients = values[: self._parameters], values[self._parameters :]
        self.rows = words[2 * self._parameters :]

    def _reserve(self, place: Path, total: int) -> np.ndarray:
        """A new file whose bytes are there: a write to one that is not would end this process."""
        self._path = place / f"lockstep-{secrets.token_hex(16)}"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, total)
            else:  # macOS
                os.truncate(descriptor, total)
            with os.fdopen(os.dup(descriptor), "r+b") as file:
                return np.memmap(file, "<i4", "r+", shape=(total // 4,)).view(np.ndarray)
        except OSError:
            self.forget()
            raise
        finally:
            os.close(descriptor)
