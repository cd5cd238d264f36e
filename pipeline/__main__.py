"""`lockstep COMMAND`, also `python -m pipeline COMMAND`: every stage, and a few tools.

Nothing heavy is imported before the command is known, so that `--help` answers at once.
"""

from pipeline.stage import signals

if __name__ == "__main__":
    signals.end_on_request()  # first: the other imports take a moment

import shutil
import sys
from importlib import import_module
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from lockstep.errors import PANIC, DivergedError, LockstepError, brief, shown
from parts.comparison.command import compare
from parts.new.command import new
from parts.projection.command import project_run
from parts.publication import commands as publication
from parts.publication import outcome
from pipeline.command_line import DEFAULT_ROOT, DEFAULT_RUN, Root, RunFile, group_by_panel
from pipeline.generate import generate
from pipeline.monitor import commands as monitor
from pipeline.stage import devices, logs
from pipeline.stage.keys import STAGES

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

app = typer.Typer(
    help="Reproducible low-communication LLM pre-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

NO_MEMORY = "RESOURCE_EXHAUSTED"  # as XLA says it
NO_DEVICE = "Unable to initialize backend"  # as JAX says it


def _show_version(shown: bool) -> None:
    if shown:
        from pipeline import version

        typer.echo(f"lockstep {version.of_source()}")
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


def _stage(name: str, run: Path, root: Path) -> None:
    """Run one stage, alone under its locks, unless its result exists already."""
    from pipeline import runfile
    from pipeline.stage import allocator, descriptors, lock
    from pipeline.stage.artifacts import Paths

    allocator.tune()
    descriptors.check()
    settings = runfile.load(run)
    paths = Paths(name, run, root)
    signals.watch_engine()
    with lock.hold(root / "data" / f".{name}.lock"), lock.hold(paths.runs / f"{paths.key}.lock"):
        if paths.has_result():
            paths.publish()
            shutil.rmtree(paths.scratch, ignore_errors=True)  # left by a kill at the very end
            print(f"{name}: {root / paths.keys.made(name)} exists already")
            return
        logs.to_stdout(settings.runtime.log_level.upper())
        devices.prepare(settings)
        import_module(f"{__package__}.{name}").run(settings, paths)


def _add_stage(name: str, description: str) -> None:
    @app.command(name, help=description)
    def stage(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
        _stage(name, run, root)


for _name, _entry in STAGES.items():
    if _name not in {"download", "report"}:  # their commands do more
        _add_stage(_name, f"{_entry['desc']}.")


@app.command(help=f"{STAGES['download']['desc']}.")
def download(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be downloaded, and download nothing.")
    ] = False,
) -> None:
    """The one stage with a dry run, since it may download gigabytes."""
    if not dry_run:
        _stage("download", run, root)
        return
    from pipeline import runfile
    from pipeline.sources import dry_run as dry
    from pipeline.stage.artifacts import Paths

    logs.to_stdout("WARNING")
    settings, paths = runfile.load(run), Paths("download", run, root)
    seen = dry.look(settings, paths)
    for line in dry.lines(settings, paths, seen):
        logs.say(line)
    raise typer.Exit(int(seen.amount.is_too_little))


@app.command(help=f"{STAGES['report']['desc']}; or show trainings.")
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
        _stage("report", run, root)
        return
    from pipeline.pages import live as live_page
    from pipeline.pages import trainings as known

    if live and not (trainings or compare):
        live_page.watch(root, out or root / live_page.PAGE, every)
    elif trainings and compare and not live:
        known.compare(trainings, root, out or root / known.PAGE)
    else:
        raise LockstepError("report: expected nothing, --live, or --compare with keys or folders")


@app.command()
def summary(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Print the results of the run; exit with status 1 if its export was refused."""
    from pipeline.pages import summary as table
    from pipeline.stage.artifacts import Paths

    raise typer.Exit(table.show(Paths("report", run, root)))


@app.command()
def push(
    destinations: Annotated[
        list[str] | None,
        typer.Argument(metavar="DEST", help="owner/name on the hub, or gs://bucket/prefix."),
    ] = None,
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    private: Annotated[
        bool, typer.Option("--private", help="Create new repositories as private.")
    ] = False,
    with_proof: Annotated[
        bool, typer.Option("--with-proof", help="With what `lockstep verify` checks; on the hub.")
    ] = False,
    key: publication.SigningKey = None,
) -> None:
    """Upload the accepted export to DEST and to the checkpointers of the run file."""
    from parts.publication import push as push_

    push_.push(run, root, destinations or (), private=private, with_proof=with_proof, key=key)


app.command()(monitor.status)
app.command()(monitor.pause)
app.command()(monitor.resume)
app.command()(publication.publish)
app.command(epilog=outcome.table())(publication.verify)
app.command()(publication.replay)
app.command()(generate)
app.command()(new)
app.command()(compare)
app.command("project")(project_run)


@app.command(
    "try",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def try_(context: typer.Context) -> None:
    """Train a model alone, by Psyche's flags in place of a run file; --help lists them."""
    from pipeline.stage import allocator

    allocator.tune()
    from parts.trial import trial

    trial.take(context.args, _stage)


@app.command("import")
def import_(source: Annotated[Path, typer.Argument(help="A Psyche configuration.")]) -> None:
    """Convert a Psyche configuration to a complete run file, and print it."""
    from pipeline.runfile.importer import import_psyche

    typer.echo(import_psyche(source), nl=False)


@app.command()
def check(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Look at all that a run will need, before it runs; status 1 where a stage would fail."""
    from pipeline.preflight import command

    command.check(run, root)


@app.command()
def plan(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    memory: Annotated[
        bool,
        typer.Option(help="Compile the run's programs for the devices here, to know their memory."),
    ] = True,
) -> None:
    """Say what a run will take, before it runs: messages, disk, memory, and what runs again."""
    from pipeline import runfile
    from pipeline.stage import allocator, reruns
    from pipeline.stage.artifacts import Paths

    allocator.tune()
    settings = runfile.load(run)
    if memory:
        devices.prepare(settings)
    planned = import_module("pipeline.preflight.planned")
    of_run = settings, root, Paths("convert", run, root).is_made("convert")
    for line in planned.footprint(*of_run).lines():
        logs.say(line)
    if memory:
        devices.keep_compiled(Paths("train", run, root).store / "compiled")
        allocator.trim_after_compiling()
        for line in planned.memory_lines(*of_run):
            logs.say(line)
    for stage, reason in reruns.reasons(run, root).items():
        said = "has its result" if reason is None else f"will run: {reason}"
        logs.say(f"{f'stage {stage}':<15}{said}")


@app.command()
def sidecar(
    connect: Annotated[str, typer.Option(help="HOST:PORT where the trainer listens.")],
    secret: Annotated[
        Path, typer.Option(envvar="LOCKSTEP_SECRET", help="A copy of the peer's secret, mode 600.")
    ],
    peer: Annotated[
        int | None, typer.Option(min=0, help="Number of the peer; its secret says which.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Processes inside the peer.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="This one among them.")] = 0,
    backend: Annotated[str, typer.Option(help="What to compute on: cpu or cuda.")] = "cpu",
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds after which it ends where no trainer is.")
    ] = 3600.0,
) -> None:
    """Run the process of one peer of a run that trains on another host, until it ends."""
    from parts.carrier import sidecar as process
    from pipeline.stage import allocator

    allocator.tune()
    process.main(
        connect, secret, peer, world_size=world_size, rank=rank, backend=backend, wait=wait
    )


@app.command()
def schema() -> None:
    """Print the JSON Schema of a run file."""
    from pipeline.runfile.schema import json_schema

    typer.echo(json_schema(), nl=False)


@app.command()
def reference() -> None:
    """Print the reference of a run file, in Markdown."""
    from pipeline.runfile.schema import markdown

    typer.echo(markdown(), nl=False)


@app.command()
def pin(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Pin the data and the checkpoint: write their hashes into the run file."""
    from pipeline.stage import pins

    for key, sha256 in pins.write(run, root).items():
        print(f"pin: {key} = {sha256}")


@app.command()
def clean(root: Root = DEFAULT_ROOT) -> None:
    """Remove unfinished work of killed runs."""
    from pipeline.stage import lock
    from pipeline.stage.artifacts import Paths

    data, runs = root / "data", root / "data" / "runs"
    left = {path: runs / f"{path.name}.lock" for path in runs.glob("*") if path.is_dir()}
    left |= {Paths(name, DEFAULT_RUN, root).aside: data / f".{name}.lock" for name in STAGES}
    for folder in sorted(filter(Path.exists, left)):
        with lock.hold(left[folder], patience_seconds=0):
            print(f"clean: {folder}")
            shutil.rmtree(folder)


group_by_panel(app)


def _print_unraisable(found: "UnraisableHookArgs") -> None:
    """Print what could not be raised, unless a thread of tensorstore lost its event loop.

    That happens after a failed save of a checkpoint, which says so itself.
    """
    lost = found.object is None and isinstance(found.exc_value, RuntimeError)
    if not lost or current_thread() is main_thread():
        sys.__unraisablehook__(found)


def main() -> None:
    """Run the command line; a user's mistake is one line and status 1 (2: no such command)."""
    signals.end_on_request()
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
    except (MemoryError, RuntimeError) as error:  # the latter of JAX's
        if str(error).startswith(NO_DEVICE):
            sys.exit(f"error: JAX_PLATFORMS: {shown(str(error))}")
        if not isinstance(error, MemoryError) and NO_MEMORY not in str(error):
            raise
        line, *_ = str(error).splitlines() or ["Python had none left"]
        cure = "a smaller [peers] micro_batch or another remat needs less"
        sys.exit(f"error: out of memory: {shown(line)}; {cure}")
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        sys.exit(f"error: a library gave up: {brief(str(error), 200)}, expected what it can read")


if __name__ == "__main__":
    main()
