"""Large messages: in files without a name, which go with the process, and not in its memory.

What of them is mapped is the system's to drop and to read again.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lockstep.errors import LockstepError

Buffer: TypeAlias = bytes | memoryview | mmap.mmap


def hold(folder: Path | None, write: Callable[[Callable[[Buffer], Any]], None]) -> mmap.mmap:
    """Return what `write` writes, one buffer after the other, by the function that it gets.

    Args:
      folder: On the disk that holds it; None is the system's folder of temporary files.
      write: Called with a function that takes the next buffer.

    Raises:
      LockstepError: The disk is full, or not there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            write(file.write)
            file.flush()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise LockstepError(
            f"{where}: {error.strerror}, expected room for the messages of a round"
        ) from error


def drop_pages(arrays: Iterable[np.ndarray]) -> None:
    """Have no page of the spooled messages that these arrays lie in count as this process's.

    Arrays that lie elsewhere are left alone. Whoever reads on reads from the disk, or from what the
    system still has of it.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):  # not on every system, and nobody's bits depend on it
        return
    for owner in {id(owner): owner for owner in map(_owner, arrays)}.values():
        if isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


def _owner(array: Any) -> Any:
    """What holds the memory of an array that is a view."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array
