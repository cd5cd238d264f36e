"""The command `lockstep summary`. Nothing heavy is imported before it runs."""

import typer

from pipeline.command_line import DEFAULT_ROOT, DEFAULT_RUN, RESULTS, Root, RunFile

app = typer.Typer()


@app.command(rich_help_panel=RESULTS)
def summary(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Print the results of the run; exit with status 1 if its export was refused."""
    from pipeline.pages import summary as table
    from pipeline.stage.artifacts import Paths

    raise typer.Exit(table.show(Paths("report", run, root)))
