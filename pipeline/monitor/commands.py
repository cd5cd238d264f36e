"""`lockstep status`, `pause` and `resume`, for a training in progress.

Nothing heavy is imported before one of them runs.
"""

import json
from typing import Annotated

import typer

from lockstep.errors import shown
from pipeline.command_line import DEFAULT_ROOT, IN_PROGRESS, Root

app = typer.Typer()


@app.command(rich_help_panel=IN_PROGRESS)
def status(
    root: Root = DEFAULT_ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how far a training is, whether it runs or was killed."""
    from pipeline.monitor import training

    found = training.newest(root)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    for name, text in found.rows():
        print(shown(f"{name:<10} {text}"))


@app.command(rich_help_panel=IN_PROGRESS)
def pause(root: Root = DEFAULT_ROOT) -> None:
    """Pause the training once its round is over; it waits until it is resumed."""
    from pipeline.monitor import training

    print(f"pause: {training.newest(root).pause()}")


@app.command(rich_help_panel=IN_PROGRESS)
def resume(root: Root = DEFAULT_ROOT) -> None:
    """Let a paused training go on."""
    from pipeline.monitor import training

    print(f"resume: {training.newest(root).resume()}")
