"""`lockstep COMMAND`, also `python -m pipeline COMMAND`: every stage, and a few tools.

Nothing heavy is imported before the command is known, so that `--help` answers at once.
"""

from pipeline.stage import signals

if __name__ == "__main__":
    signals.end_on_request()  # first: the other imports take a moment

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from typer.exceptions import TyperException

from lockstep.errors import PANIC, DivergedError, LockstepError, brief, shown
from pipeline.command_options import (
    DEFAULT_ROOT,
    DEFAULT_RUN,
    IN_PROGRESS,
    RESULTS,
    RUN_FILES,
    STAGES_IN_ORDER,
    Commands,
    Root,
    RunFile,
)
from pipeline.generate import generate
from pipeline.joints import Joint
from pipeline.preflight import commands as preflight
from pipeline.run_stage import run_stage
from pipeline.stage import devices, logs
from pipeline.stage.keys import PROJECT, STAGES

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

app = typer.Typer(
    cls=Commands,
    help="Reproducible low-communication LLM pre-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class OffersCommands(Protocol):
    """More commands."""

    app: typer.Typer


NO_MEMORY = "RESOURCE_EXHAUSTED"  # as XLA says it
NO_DEVICE = "Unable to initialize backend"  # as JAX says it
# ... and what it says of a variable's value, which it reads at its import
NO_VALUE = re.compile(r"(?i) for (?:JAX flag |environment ')(jax_\w{1,80})")


def _show_version(shown: bool) -> None:
    if shown:
        from pipeline import version

        typer.echo(f"lockstep {version.with_commit()}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `lockstep` itself."""
    here = Path.cwd()
    is_checkout = all(Path(name).is_file() for name in ("dvc.yaml", "pipeline/stage/keys.py"))
    if is_checkout and not here.samefile(PROJECT):
        raise LockstepError(
            f"{here}: a checkout of Lockstep, and this command runs the code of {PROJECT}, "
            "expected an environment for each: `make clean` here, then `make environment`, and "
            "activate it"
        )


@app.command(help=f"{STAGES['download']['desc']}.", rich_help_panel=STAGES_IN_ORDER)
def download(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be downloaded, and download nothing.")
    ] = False,
) -> None:
    """The one stage with a dry run, since it may download gigabytes."""
    if not dry_run:
        run_stage("download", run, root)
        return
    from pipeline import runfile
    from pipeline.sources import dry_run as dry
    from pipeline.stage.artifacts import Paths

    logs.to_stdout("WARNING")
    settings, paths = runfile.load(run), Paths("download", run, root)
    preview = dry.look(settings, paths)
    for line in dry.lines(settings, paths, preview):
        logs.say(line)
    raise typer.Exit(int(preview.amount.is_too_little))


def _add_stage(name: str, description: str) -> None:
    @app.command(name, help=description, rich_help_panel=STAGES_IN_ORDER)
    def stage(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
        run_stage(name, run, root)


for _name, _entry in STAGES.items():
    if _name != "download":
        _add_stage(_name, f"{_entry['desc']}.")


@app.command(rich_help_panel=IN_PROGRESS)
def status(
    root: Root = DEFAULT_ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how far a training is, whether it runs or was killed."""
    from pipeline.monitor import training

    first, *others = training.in_progress(root)
    if as_json:
        print(json.dumps(first.to_json() | {"others": [one.to_json() for one in others]}))
        return
    rows = [*first.rows(), *(("other", f"{one.name}, {one.state}") for one in others)]
    for name, text in rows:
        print(shown(f"{name:<10} {text}"))


TrainingKey = Annotated[
    str | None, typer.Option("--key", help="Of the training, where there are several.")
]


@app.command(rich_help_panel=IN_PROGRESS)
def pause(root: Root = DEFAULT_ROOT, key: TrainingKey = None) -> None:
    """Pause the training once its round is over; it waits until it is resumed."""
    from pipeline.monitor import training

    found = training.asked(root, key, training.Training.can_pause)
    print(shown(f"pause: {found.name}: {found.pause()}"))


@app.command(rich_help_panel=IN_PROGRESS)
def resume(root: Root = DEFAULT_ROOT, key: TrainingKey = None) -> None:
    """Let a paused training go on."""
    from pipeline.monitor import training

    found = training.asked(root, key, training.Training.can_resume)
    print(shown(f"resume: {found.name}: {found.resume()}"))


@app.command(rich_help_panel=RESULTS)
def summary(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Print the results of the run; exit with status 1 if its export was refused."""
    from pipeline.pages import summary as table
    from pipeline.stage.artifacts import Paths

    raise typer.Exit(table.show(Paths("report", run, root)))


# Not `add_typer`, which puts its commands behind all of this file's in `lockstep --help`.
app.command(rich_help_panel=RESULTS)(generate)
for _commands in (preflight, *Joint[OffersCommands]("commands")):
    app.registered_commands += _commands.app.registered_commands
    app.registered_groups += _commands.app.registered_groups


@app.command(rich_help_panel=IN_PROGRESS)
def clean(root: Root = DEFAULT_ROOT) -> None:
    """Remove unfinished work of killed runs."""
    from pipeline.stage import lock
    from pipeline.stage.artifacts import Paths

    data, runs = root / "data", root / "data" / "runs"
    locks = {path: runs / f"{path.name}.lock" for path in runs.glob("*") if path.is_dir()}
    for name in STAGES:
        paths = Paths(name, DEFAULT_RUN, root)
        locks |= dict.fromkeys((paths.aside, paths.old), data / f".{name}.lock")
    for folder in sorted(filter(Path.exists, locks)):
        with lock.hold(locks[folder], patience_seconds=0):
            print(f"clean: {folder}")
            shutil.rmtree(folder)


@app.command(rich_help_panel=RUN_FILES)
def pin(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Pin the data, the checkpoint and the tasks: write their hashes into the run file."""
    from pipeline.stage import pins

    for key, sha256 in pins.write(run, root).items():
        print(f"pin: {key} = {sha256}")


@app.command("import", rich_help_panel=RUN_FILES)
def import_(source: Annotated[Path, typer.Argument(help="A Psyche configuration.")]) -> None:
    """Convert a Psyche configuration to a complete run file, and print it."""
    from pipeline.runfile.psyche_import import import_psyche

    typer.echo(import_psyche(source).encode(), nl=False)  # TOML is UTF-8, also in another locale


@app.command(rich_help_panel=RUN_FILES)
def whole(
    file: Annotated[Path, typer.Argument(help="A run file that has a base, such as default.toml.")],
) -> None:
    """Print a run file with every table, those of its base included."""
    from pipeline.toml_file import written_whole

    typer.echo(written_whole(file).encode(), nl=False)


@app.command(rich_help_panel=RUN_FILES)
def schema() -> None:
    """Print the JSON Schema of a run file."""
    from pipeline.runfile.schema import json_schema

    typer.echo(json_schema().encode(), nl=False)


def _print_unraisable(unraisable: "UnraisableHookArgs") -> None:
    """Print what could not be raised, unless a thread of tensorstore lost its event loop.

    That happens after a failed save of a checkpoint, which reports itself.
    """
    lost = unraisable.object is None and isinstance(unraisable.exc_value, RuntimeError)
    if not lost or current_thread() is main_thread():
        sys.__unraisablehook__(unraisable)


def _open_streams() -> None:
    """Put the null device where a standard stream was closed; print what it has no letter for."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it


def _for_user(error: Exception) -> str | None:
    """Return the line of an error of JAX or of memory that a user can act on, None for another."""
    text = str(error)
    if isinstance(error, ValueError):
        found = NO_VALUE.search(text)
        if found is None or (name := found[1].upper()) not in os.environ:
            return None
        return f"{name}: found {os.environ[name]!r}, expected what JAX can read"
    if text.startswith(NO_DEVICE):
        return f"JAX_PLATFORMS: {shown(text)}"
    if not isinstance(error, MemoryError) and NO_MEMORY not in text:
        return None
    line, *_ = text.splitlines() or ["Python had none left"]
    cure = "a smaller [peers] micro_batch or another remat needs less"
    return f"out of memory: {shown(line)}; {cure}"


def main() -> None:
    """Run the command line; a user's mistake is one line and status 1 (2: no such command)."""
    signals.end_on_request()
    _open_streams()
    sys.unraisablehook = _print_unraisable
    devices.leave_out_settings()
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TyperException as error:  # a wrong command line
        if line := error.format_message().rstrip("."):  # else its help was shown
            end = "" if line.endswith("?") else ";"  # did you mean this?
            print(
                f"error: {shown(line)}{end} see `{error.ctx.command_path} --help`", file=sys.stderr
            )
        sys.exit(error.exit_code)
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except LockstepError as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # the disk is full, a folder not writable, a file gone
        path = error.filename2 or error.filename or "input or output"
        line = f"{path}: {error.strerror or error}, expected to read or write there"
        sys.exit(f"error: {shown(line)}")
    except (MemoryError, RuntimeError, ValueError) as error:
        if (line := _for_user(error)) is None:
            raise
        sys.exit(f"error: {line}")
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        sys.exit(f"error: a library gave up: {brief(str(error), 200)}, expected what it can read")


if __name__ == "__main__":
    main()
