"""Arrays shared with a worker, which maps the same bytes, so that nothing is copied.

A mapped file that its other end cuts short ends whoever reads it. In memory Linux seals it: it
cannot become shorter. A file on a disk can.
"""

import fcntl
import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from lockstep.errors import expecting

IN_MEMORY = Path("/dev/shm")  # a file system without a disk, whose room is that of memory
SPARE = 2**27  # bytes that are left to others there


class SharedArrays:
    """Params, gradients and rows, shared with a worker: in memory if there is room, else in a file.

    Attributes:
      params: float32 [parameters], what the worker computes at.
      gradients: float32 [parameters], what it writes.
      rows: int32, one row after the other.

    Args:
      folder: Where they are if there is no room in memory.
      parameters: How many numbers the params have.
    """

    def __init__(self, folder: Path, parameters: int):
        self._folder, self._parameters = folder, parameters
        self.make_room(0)

    def make_room(self, row_words: int) -> None:
        """Take room to share so many words of rows, elsewhere; what was in the arrays is lost."""
        size = 4 * (2 * self._parameters + max(1, row_words))
        in_memory = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > size + SPARE
        try:
            words = self._reserve(size, None if in_memory else self._folder)
        except OSError:  # others took the room at the same time
            with expecting(self._folder, f"room for {size} bytes"):
                words = self._reserve(size, self._folder)
        values, self.rows = np.split(words, [2 * self._parameters])
        self.params, self.gradients = np.split(values.view("<f4"), 2)

    def request(self) -> dict:
        """Return the arguments of a worker's `open_arrays`: the path, and where each array is."""
        size = 4 * self._parameters
        return {
            "path": str(self._path),
            "params": [0, self._parameters],
            "gradients": [size, self._parameters],
            "rows": [2 * size, self.rows.nbytes],
        }

    def forget(self) -> None:
        """Let go of the shared bytes' name, once both have mapped them: a kill leaves no file."""
        if self._descriptor is None:
            self._path.unlink(missing_ok=True)
        else:
            os.close(self._descriptor)

    def _reserve(self, size: int, folder: Path | None) -> np.ndarray:
        """Take shared bytes that are there, as int32: a write to one that is not ends a process."""
        self._descriptor: int | None = None
        if folder is None:
            descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._path, self._descriptor = Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor
        else:
            self._path = folder / f"lockstep-{secrets.token_hex(16)}"
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:  # macOS
                os.truncate(descriptor, size)
            if folder is None:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            with os.fdopen(os.dup(descriptor), "r+b") as file:
                return np.memmap(file, "<i4", "r+", shape=(size // 4,)).view(np.ndarray)
        except OSError:
            self.forget()
            raise
        finally:
            if folder is not None:
                os.close(descriptor)
