"""`lockstep report` and `summary`: the results of a run, as a page and as a table.

Nothing heavy is imported before one of them runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError
from pipeline.command_line import (
    DEFAULT_ROOT,
    DEFAULT_RUN,
    RESULTS,
    STAGES_IN_ORDER,
    Root,
    RunFile,
    run_stage,
)
from pipeline.stage.keys import STAGES

app = typer.Typer()


@app.command(
    help=f"{STAGES['report']['desc']}; or show trainings.", rich_help_panel=STAGES_IN_ORDER
)
def report(
    trainings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Trainings to compare: keys, or folders."),
    ] = None,
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put trainings side by side on a page instead.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Keep a page of the training in progress instead.")
    ] = False,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two live pages.")] = 10,
    out: Annotated[Path | None, typer.Option(help="The page of --compare or --live.")] = None,
) -> None:
    """The stage, and two pages that are no stage's result."""
    if not (trainings or compare or live):
        run_stage("report", run, root)
        return
    from pipeline.pages import live as live_page
    from pipeline.pages import trainings as known

    if live and not (trainings or compare):
        live_page.watch(root, out or root / live_page.PAGE, every)
    elif trainings and compare and not live:
        known.compare(trainings, root, out or root / known.PAGE)
    else:
        raise LockstepError("report: expected nothing, --live, or --compare with keys or folders")


@app.command(rich_help_panel=RESULTS)
def summary(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Print the results of the run; exit with status 1 if its export was refused."""
    from pipeline.pages import summary as table
    from pipeline.stage.artifacts import Paths

    raise typer.Exit(table.show(Paths("report", run, root)))
