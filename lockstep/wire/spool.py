"""Large messages in files without a name, which vanish with the process, instead of in memory.

They are mapped, so the system may drop their pages and read them again.
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
    """Return a spool, a mapped file, of the buffers that `write` hands to its argument, in order.

    It is in `folder`, by default the system's folder of temporary files.
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
    """Release the pages of the spooled messages in which these arrays lie.

    Other arrays are left alone. A later read comes from the disk, or from the system's cache.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):  # not on every system, and nobody's bits depend on it
        return
    for owner in {id(owner): owner for owner in map(_owner, arrays)}.values():
        if isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


def _owner(array: Any) -> Any:
    """Return the object that holds a view's memory, such as a spool's map."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array
