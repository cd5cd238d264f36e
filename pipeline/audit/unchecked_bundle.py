"""A bundle before any of its files is hashed or computed with; imports no JAX."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError, RequestError
from lockstep.files import read_json
from lockstep.machine.progress import size
from lockstep.tables.validation import validate
from pipeline import runfile
from pipeline.runfile import strangers
from pipeline.runfile.parts import check_parts
from pipeline.runfile.strangers_values import Use
from pipeline.stage.keys import PROJECT, WORKLOADS, lacks_of_factory
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
    reader's `worker` runs the workload, if the run has one: without it, none is run.

    Raises:
      LockstepError: The bundle is too large, or has anything but files, or no run for strangers.
      RequestError: The worker cannot be, or there is no workload that it could run.
    """
    check_regular(folder)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if total > max_gb * 1e9:
        raise LockstepError(
            f"{folder}: {size(total)}, expected at most {max_gb} GB; where a bundle may be "
            "that large, say so with --max-gb"
        )
    own = {name: value for name, value in (worker or WorkerOfReader())._asdict().items() if value}
    check_parts({"runtime": own}, "the command line")
    lacks, how = partial(lacks_of_factory, folder=PROJECT / WORKLOADS), "--worker-python PYTHON"
    consents = dict.fromkeys(strangers.CONSENTED if own else (), lacks)
    name = str(folder / RUN)
    runtime = validate(runfile.Runtime, own, "the command line", RequestError)
    run = strangers.read(read_json(folder / RUN), name, Use.REPEATED, runtime, consents, how)
    if own and not any(attrgetter(key)(run) for key in strangers.CONSENTED):
        option, value = next(iter(own.items()))
        words = [f"--{option.replace('_', '-')}", *([value] if isinstance(value, str) else value)]
        raise RequestError(f"{' '.join(words)}: expected none of a run without a workload")
    return run
