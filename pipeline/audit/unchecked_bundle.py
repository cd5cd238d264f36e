"""A bundle before any of its files is hashed or computed with; imports no JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.machine.progress import size
from pipeline import runfile
from pipeline.stage.untrusted_files import check_regular

RUN = "run.json"


class WorkerOfReader(NamedTuple):
    """The keys of [runtime] by which a reader runs a workload; what is empty is Lockstep's own."""

    worker_python: str = ""
    worker_module: str = ""
    worker_path: Sequence[str] | None = None


def read_run(folder: Path, max_gb: int, worker: WorkerOfReader | None = None) -> runfile.Run:
    """Return a bundle's run.

    Its files may have `max_gb` 10^9 bytes together: each is hashed, most will be in memory. The
    reader's `worker` runs the workload, if the run has one.

    Raises:
      LockstepError: The bundle is too large, has anything but files, or no valid run, or a run
        whose steps a command takes.
    """
    check_regular(folder)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if total > max_gb * 1e9:
        raise LockstepError(
            f"{folder}: {size(total)}, expected at most {max_gb} GB; where a bundle may be "
            "that large, say so with --max-gb"
        )
    document = read_json(folder / RUN)
    if isinstance(document, dict) and isinstance(runtime := document.get("runtime"), dict):
        # the other keys are about the sender's machine, and differ between releases
        document["runtime"] = {key: runtime[key] for key in runtime if key == "carrier"}
    run = runfile.parse(document, str(folder / RUN))
    if run.workload.inner == "command":
        raise LockstepError(
            f"{folder / RUN}: workload.command is {list(run.workload.command)}, expected none: a "
            "stranger's command is not run"
        )
    table = {name: value for name, value in (worker or WorkerOfReader())._asdict().items() if value}
    return run.model_copy(update={"runtime": runfile.Runtime(**table)})
