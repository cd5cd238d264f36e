"""A training in progress, seen and steered from another process."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import writes
from lockstep.tables.explain import validate_json
from pipeline.monitor import pause
from pipeline.monitor.find import in_progress
from pipeline.monitor.status import STATUS_FILE, Status
from pipeline.stage import lock

STATES = ("starting", "training", "pausing", "paused", "stopped")
"""Before the first round; taking rounds; ending the epoch for a pause; waiting to be resumed; and
without a process: killed, or asked to stop."""


class Training(NamedTuple):
    """A training that has not ended, seen from another process.

    Attributes:
      folder: Its work in progress, `data/runs/<key>`.
      status: What it wrote last.
      process: The process that holds its lock, or None.
    """

    folder: Path
    status: Status
    process: int | None

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.process is None:
            return "stopped"
        if self.process != self.status.process:  # which has not told anything yet
            return "starting"
        if self.status.state == "training" and pause.is_asked(self.folder):
            return "pausing"
        return self.status.state

    @property
    def disk_bytes(self) -> int:
        """Bytes of its work in progress."""
        total = 0
        for parent, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # replaced or removed meanwhile
                    total += os.stat(os.path.join(parent, name)).st_size
        return total

    @property
    def free_bytes(self) -> int:
        """Free bytes of the disk that it writes to."""
        return shutil.disk_usage(self.folder).free

    def pause(self) -> str:
        """Ask for a pause, and return what comes of it.

        Raises:
          LockstepError: No process is there to pause, or it is asked to already.
        """
        if self.state not in ("starting", "training"):
            raise LockstepError(
                f"{self.folder}: the training is {self.state}, expected a running one"
            )
        with writes(self.folder):
            pause.ask(self.folder)
        return "once its round is over, the training waits; `lockstep resume` lets it go on"

    def resume(self) -> str:
        """Take a pause back, and return what comes of it.

        Raises:
          LockstepError: Nobody asked for one.
        """
        if not pause.is_asked(self.folder):
            raise LockstepError(
                f"{self.folder}: the training is {self.state}, expected one that was paused"
            )
        with writes(self.folder):
            pause.withdraw(self.folder)
        return "the training goes on" if self.process else "the same command as before goes on"

    def to_json(self) -> dict:
        """Return all of it, as `json.dumps` takes it."""
        return self.status.model_dump(mode="json") | {
            "state": self.state,
            "process": self.process,
            "seconds_left": self.status.seconds_left,
            "folder": str(self.folder),
            "disk_bytes": self.disk_bytes,
            "free_bytes": self.free_bytes,
        }


def read(folder: Path) -> Training:
    """Return the training whose work in progress is in `folder`.

    Raises:
      LockstepError: Its status.json is missing or damaged.
    """
    path = folder / STATUS_FILE
    try:
        status = validate_json(Status, path.read_bytes(), str(path))
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected where a training is") from error
    return Training(folder, status, lock.holder(folder.with_name(f"{folder.name}.lock")))


def newest(root: Path) -> Training:
    """Return the training below `root` that goes on or, if none does, the last one that did.

    Raises:
      LockstepError: There is none.
    """
    runs = in_progress(root)
    trainings = [read(path.parent) for path in runs.glob(f"*/{STATUS_FILE}")]
    if not trainings:
        raise LockstepError(
            f"{runs}: no training in progress, expected one that runs or was killed; "
            "`lockstep summary` shows a finished one"
        )
    return max(trainings, key=lambda one: (one.process is not None, one.status.updated))
