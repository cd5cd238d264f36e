"""The command `lockstep sidecar`. Nothing heavy is imported before it runs.

Stage train starts it as `python -m parts.carrier.commands`, without the other commands.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError, shown
from pipeline.command_options import IN_PROGRESS

app = typer.Typer()


@app.command(rich_help_panel=IN_PROGRESS)
def sidecar(  # noqa: PLR0913 - each is an option
    connect: Annotated[str, typer.Option(help="HOST:PORT where the trainer listens.")],
    secret: Annotated[
        Path, typer.Option(envvar="LOCKSTEP_SECRET", help="A copy of the peer's secret, mode 600.")
    ],
    peer: Annotated[
        int | None, typer.Option(min=0, help="Number of the peer; its secret says which.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Your copy of the run file, if its workload runs here.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Processes inside the peer.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="This one among them.")] = 0,
    backend: Annotated[str, typer.Option(help="What to compute on: cpu or cuda.")] = "cpu",
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds after which it ends where no trainer is.")
    ] = 3600.0,
    parent_pid: Annotated[int, typer.Option(hidden=True, help="End with this process.")] = 0,
) -> None:
    """Run the process of one peer of a run that trains on another host, until it ends."""
    options = dict(locals())
    from lockstep.machine import allocator

    allocator.tune()
    from parts.carrier import sidecar as process

    process.main(**options)


if __name__ == "__main__":
    try:
        app()
    except (LockstepError, OSError) as error:
        sys.exit(f"error: {shown(str(error))}")
