"""One process per stage: a lock that the kernel releases when its holder ends, in any way."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import writes

log = logging.getLogger(__name__)

SILENT_SECONDS = 2.0  # of a wait, after which it says for whom it waits


@contextmanager
def hold(path: Path, patience_seconds: float = 60.0) -> Iterator[None]:
    """Hold a stage's lock at `path`, waiting a while for a holder that is about to end.

    A trainer whose engine was killed needs a moment to notice and save (signals.py), on a busy
    machine more than ten seconds, so an engine that starts right after waits for it instead of
    failing.
    """
    with writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        began, warned = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                file.seek(0)
                holder = file.read().strip() or "unknown"
                if waited > patience_seconds:
                    raise LockstepError(
                        f"{path}: held by process {holder}, expected to be free: the same stage is "
                        "running already; wait for it or end it"
                    ) from None
                if waited > SILENT_SECONDS and not warned:
                    warned = True
                    log.warning(
                        f"{path}: held by process {holder}; waits up to {patience_seconds:g} s"
                    )
                time.sleep(0.1)
            except OSError as error:
                raise LockstepError(
                    f"{path}: {error.strerror}, expected a file system with flock; "
                    "docs/how-to/scale.md says what a shared one must do"
                ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def holder(path: Path) -> int | None:
    """Return the id of the process that holds the lock at `path`, on any host, or None."""
    try:
        with open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().partition(" ")[0] or 0)  # it is about to write its own
    except FileNotFoundError:
        pass
    return None
