"""The command `lockstep check`."""

from pathlib import Path

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.preflight.preflight import Preflight
from pipeline.preflight.row import Mark, lines
from pipeline.stage import logs
from pipeline.stage.keys import STAGES, Keys


def check(run_file: Path, root: Path) -> None:
    """Print the table of what a run will need.

    Raises:
      LockstepError: The run file is not valid, or a row of the table says that a stage would fail.
    """
    if failing := show(run_file, root):
        raise LockstepError(f"{run_file}: the run would fail by {failing} of these rows")


def show(run_file: Path, root: Path) -> int:
    """Print the table, and return how many rows say that a stage would fail.

    Raises:
      LockstepError: The run file is not valid, or lacks a table that an engine asks for.
    """
    run, keys = runfile.load(run_file), Keys(run_file)
    for stage in STAGES:
        keys.key(stage)
    logs.to_stdout("WARNING")
    failing = 0
    for row in Preflight(run, run_file, root).rows():
        failing += row.mark is Mark.FAILS
        for line in lines([row]):
            logs.say(line)
    return failing
