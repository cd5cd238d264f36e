"""The command `lockstep try`. Nothing heavy is imported before it runs."""

import typer

from pipeline.command_options import RUN_FILES

app = typer.Typer()


@app.command(
    "try",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel=RUN_FILES,
)
def try_(context: typer.Context) -> None:
    """Train a model alone, by Psyche's flags in place of a run file; --help lists them."""
    from parts.trial import trial

    trial.take(context.args)
