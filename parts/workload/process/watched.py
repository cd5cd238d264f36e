"""Folders that a worker must not change."""

import stat
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError, brief
from pipeline.stage.given_files import walk

FileFacts = tuple[int, int, int]  # time of the last change in nanoseconds, size in bytes, inode


class Watched:
    """The state of folders or files; cheap to compare, since no content is read.

    Python's own `__pycache__` does not count, nor does what a folder's name links to.

    Args:
      paths: What is watched; one that is not there has to stay so.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = tuple(paths)
        self._before = self._facts()

    def changed(self) -> list[Path]:
        """Return what was changed, added or removed since, in the order of names."""
        now = self._facts()
        either = sorted(self._before.keys() | now.keys())
        return [path for path in either if self._before.get(path) != now.get(path)]

    def check(self, who: str) -> None:
        """Check that nothing was changed since.

        Raises:
          LockstepError: Something was. `who` is named, such as a workload.
        """
        if changed := self.changed():
            more = f" and {len(changed) - 1} more" * (len(changed) > 1)
            what = f"{brief(str(changed[0]), 300)}{more} changed while it ran"
            raise LockstepError(f"{who}: {what}, expected it to write in its own folder only")

    def _facts(self) -> dict[Path, FileFacts]:
        facts = {}
        for path in self.paths:
            for found in [path, *(below for _, below in walk(path))] if path.is_dir() else [path]:
                if "__pycache__" in found.parts:
                    continue
                try:
                    status = found.stat(follow_symlinks=found in self.paths)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    facts[found] = status.st_mtime_ns, status.st_size, status.st_ino
        return facts
