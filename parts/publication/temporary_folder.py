"""A folder for work of which nothing is left, however its process ends."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.files import writes
from pipeline.stage import lock, signals


@contextmanager
def folder(runs: Path, title: str, then: str = signals.AGAIN) -> Iterator[Path]:
    """Yield an empty temporary folder, gone at the block's end, and after Ctrl-C and SIGTERM.

    After SIGKILL it stays among the unfinished work of other commands until `lockstep clean`
    removes it: nobody holds its lock any more.

    Args:
      runs: Folder of unfinished work, `data/runs`; made if it is not there, and then gone too.
      title: What its name begins with.
      then: What the same command does after a request to stop, for the line that is printed.
    """
    path = runs / f"{title}-{os.getpid()}-{secrets.token_hex(4)}"
    lock_file = path.with_name(f"{path.name}.lock")
    new = [place for place in (runs, *runs.parents) if not place.exists()]

    def clean() -> None:
        shutil.rmtree(path, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        with suppress(OSError):  # somebody else put something there
            for place in new:
                place.rmdir()

    with signals.cleaning(clean, then), lock.hold(lock_file):
        with writes(path):
            path.mkdir()
        yield path
