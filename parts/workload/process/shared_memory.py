"""Bytes that another process maps too, so that nothing is copied.

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


class SharedMemory:
    """Shared bytes: in memory if there is room, else in a file of a folder.

    Attributes:
      words: The bytes as int32.
      path: Where another process opens them.
    """

    words: np.ndarray
    path: Path

    def __init__(self, size: int, folder: Path):
        self._descriptor: int | None = None
        in_memory = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > size + SPARE
        try:
            self._reserve(size, None if in_memory else folder)
        except OSError:  # others took the room at the same time
            with expecting(folder, f"room for {size} bytes"):
                self._reserve(size, folder)

    def forget(self) -> None:
        """Let go of the shared memory's name, once both have mapped it: a kill leaves no file."""
        if self._descriptor is None:
            self.path.unlink(missing_ok=True)
        else:
            os.close(self._descriptor)

    def _reserve(self, size: int, folder: Path | None) -> None:
        """Take shared memory that is there: a write to one that is not would end this process."""
        self._descriptor = None
        if folder is None:
            descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.path, self._descriptor = Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor
        else:
            self.path = folder / f"lockstep-{secrets.token_hex(16)}"
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:  # macOS
                os.truncate(descriptor, size)
            if folder is None:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            with os.fdopen(os.dup(descriptor), "r+b") as file:
                self.words = np.memmap(file, "<i4", "r+", shape=(size // 4,)).view(np.ndarray)
        except OSError:
            self.forget()
            raise
        finally:
            if folder is not None:
                os.close(descriptor)
