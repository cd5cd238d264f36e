"""What commands have in common: options, and the panels of `lockstep --help`."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.stage.keys import RUN_FILE, STAGES

RunFile = Annotated[Path, typer.Option("--run", help="The run file.")]
Root = Annotated[Path, typer.Option("--root", help="The folder where data/ and metrics/ lie.")]
DEFAULT_RUN, DEFAULT_ROOT = Path(RUN_FILE), Path()

PANELS = {  # from top to bottom, with their commands
    "Stages, in their order": tuple(STAGES),
    "A run in progress": ("status", "pause", "resume", "sidecar", "clean"),
    "Results": ("summary", "generate", "push", "publish", "verify", "replay"),
    "Run files": (
        "new",
        "compare",
        "project",
        "check",
        "plan",
        "pin",
        "import",
        "try",
        "schema",
        "reference",
    ),
}


def group_by_panel(app: typer.Typer) -> None:
    """Sort the commands into `PANELS`, which names each of them once."""
    known = {c.name or c.callback.__name__: c for c in app.registered_commands}
    app.registered_commands.clear()
    for panel, names in PANELS.items():
        for name in names:
            known[name].rich_help_panel = panel
            app.registered_commands.append(known.pop(name))
    assert not known, f"{sorted(known)} are in no panel"
