"""`lockstep check` and `plan`: what a run needs and takes, before it runs.

Nothing heavy is imported before one of them runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError
from pipeline.command_options import DEFAULT_ROOT, DEFAULT_RUN, RUN_FILES, Root, RunFile
from pipeline.stage import devices, logs
from pipeline.stage.keys import STAGES, Keys

app = typer.Typer()


@app.command(rich_help_panel=RUN_FILES)
def check(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Look at all that a run will need, before it runs; status 1 where a stage would fail."""
    if failing := show(run, root):
        raise LockstepError(f"{run}: the run would fail because of {failing} of these rows")


def show(run_file: Path, root: Path) -> int:
    """Print the table of what a run needs, and return how many rows say that a stage would fail."""
    from pipeline import runfile
    from pipeline.preflight.preflight import Preflight
    from pipeline.preflight.row import Mark

    run, keys = runfile.load(run_file), Keys(run_file)
    for stage in STAGES:
        keys.key(stage)
    logs.to_stdout("WARNING")
    failing = 0
    for row in Preflight(run, run_file, root).rows():
        failing += row.mark is Mark.FAILS
        logs.say(row.line())
    return failing


@app.command(rich_help_panel=RUN_FILES)
def plan(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    memory: Annotated[
        bool,
        typer.Option(help="Compile the run's programs for the devices here, to know their memory."),
    ] = True,
) -> None:
    """Say what a run will take, before it runs: messages, disk, memory, and what runs again."""
    from lockstep.machine import allocator
    from pipeline import runfile
    from pipeline.stage import artifacts
    from pipeline.stage.artifacts import Paths

    allocator.tune()
    settings = runfile.load(run)
    if memory:
        devices.prepare(settings)
    from pipeline.preflight import plan as planned  # only now: it imports JAX
    from pipeline.subject import subject_of

    converted = Paths("convert", run, root).is_made("convert")
    for line in planned.plan(settings, root, converted=converted).lines():
        logs.say(line)
    if memory:
        devices.keep_compiled(Paths("train", run, root).store / "compiled")
        allocator.trim_after_compiling()
        for line in planned.memory_lines(settings, root, converted=converted):
            logs.say(line)
    repeats = subject_of(settings).repeats(settings)
    if why := devices.never_comparable(settings, repeats=repeats):
        logs.say(f"audit          no window can be compared: {why}")
    for stage, reason in artifacts.rerun_reasons(run, root).items():
        state = "has its result" if reason is None else f"will run: {reason}"
        logs.say(f"{f'stage {stage}':<15}{state}")
