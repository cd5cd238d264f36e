"""`lockstep COMMAND`, also `python -m pipeline COMMAND`: every stage by hand, and a few tools.

Imports nothing heavy before it knows what is asked, so that `--help` answers at once.
"""

import logging
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import LockstepError
from pipeline.stage.keys import RUN_FILE, STAGES

app = typer.Typer(
    help="Reproducible low-communication LLM pre-training: the stages, one by one.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Option("--run", help="The run file.")]
Root = Annotated[Path, typer.Option("--root", help="The folder where data/ and metrics/ lie.")]
DEFAULT_RUN, DEFAULT_ROOT = Path(RUN_FILE), Path()


def _stage(name: str, run: Path, root: Path) -> None:
    """Runs one stage, alone under its locks, unless its result is there already."""
    from pipeline import runfile
    from pipeline.stage import allocator, devices, lifeline, lock
    from pipeline.stage.artifacts import Paths, verify

    allocator.tune()
    settings = runfile.load(run)
    paths = Paths(name, run, root)
    lifeline.watch()
    with (
        lock.hold(root / "data" / f".{name}.lock"),
        lock.hold(paths.runs / f"{paths.key}.lock"),
    ):
        if paths.is_made(name):
            verify(root / paths.keys.made(name))
            paths.publish()
            shutil.rmtree(paths.scratch, ignore_errors=True)  # of a stage killed as it ended
            print(f"{name}: {root / paths.keys.made(name)} is there already")
            return
        logging.basicConfig(
            level=settings.runtime.log_level.upper(), format="%(message)s", stream=sys.stdout
        )
        for library in ("jax", "matplotlib", "httpx", "httpx2", "filelock", "urllib3", "fsspec"):
            logging.getLogger(library).setLevel(logging.WARNING)
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns of what is not wrong
        devices.prepare(settings)
        import_module(f"pipeline.{name}").run(settings, paths)


def _add_stage(name: str, description: str) -> None:
    @app.command(name, help=description)
    def stage(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
        _stage(name, run, root)


for _name, _entry in STAGES.items():
    if _name != "download":
        _add_stage(_name, f"{_entry['desc']}.")


@app.command(help=f"{STAGES['download']['desc']}.")
def download(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")
    ] = False,
) -> None:
    """The one stage that can say what it would do, since it may be gigabytes."""
    if not dry_run:
        _stage("download", run, root)
        return
    from pipeline import runfile
    from pipeline.sources import dry_run as dry
    from pipeline.stage.artifacts import Paths

    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
    for line in dry.lines(runfile.load(run), Paths("download", run, root)):
        print(line)


@app.command()
def summary(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Print what the run came to; exit with status 1 where its export was refused."""
    from pipeline.pages import summary as table
    from pipeline.stage.artifacts import Paths

    raise typer.Exit(table.show(Paths("report", run, root)))


@app.command()
def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A folder of data/verdict/bundles.")
    ],
) -> None:
    """Repeat the replay that found something; exit with status 1 where it is not confirmed."""
    from pipeline import runfile
    from pipeline.stage import allocator, artifacts, devices

    allocator.tune()
    run = folder / "run.json"
    devices.prepare(runfile.parse(artifacts.read_json(run), str(run)))
    from pipeline.audit import repeat

    raise typer.Exit(repeat.show(folder))


@app.command()
def push(
    destinations: Annotated[
        list[str] | None,
        typer.Argument(metavar="DEST", help="owner/name on the hub, or gs://bucket/prefix."),
    ] = None,
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    private: Annotated[
        bool, typer.Option("--private", help="Make a repository private that is not there yet.")
    ] = False,
) -> None:
    """Upload the accepted export, also to where the run file's checkpointers say."""
    from pipeline.pages import push as push_

    push_.push(run, root, destinations or (), private=private)


@app.command("import")
def import_(source: Annotated[Path, typer.Argument(help="A Psyche configuration.")]) -> None:
    """Print a whole run file made out of a Psyche configuration."""
    from pipeline.runfile.importer import import_psyche

    typer.echo(import_psyche(source), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a run file."""
    from pipeline.runfile import schema as schema_

    typer.echo(schema_.generate(), nl=False)


@app.command()
def pin(run: RunFile = DEFAULT_RUN, root: Root = DEFAULT_ROOT) -> None:
    """Hold data and checkpoint to what was read: write their hashes into the run file."""
    from pipeline.stage import pins

    for key, sha256 in pins.write(run, root).items():
        print(f"pin: {key} = {sha256}")


@app.command()
def clean(root: Root = DEFAULT_ROOT) -> None:
    """Remove the work in progress that killed runs left."""
    from pipeline.stage import lock

    runs = root / "data" / "runs"
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        with lock.hold(runs / f"{folder.name}.lock", patience_seconds=0):
            print(f"clean: {folder}")
            shutil.rmtree(folder)


def main() -> None:
    """The command line: a user's mistake is one line and status 1, never a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except LockstepError as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # the disk is full, a folder not writable, a file gone
        place = error.filename2 or error.filename or "input or output"
        sys.exit(f"error: {place}: {error.strerror or error}, expected to read or write there")


if __name__ == "__main__":
    main()
