"""The commands under `lockstep bits`. Nothing heavy is imported before."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.errors import shown
from lockstep.files import check_regular_file, named_place, write_named
from pipeline.command_options import (
    DEFAULT_ROOT,
    DEFAULT_RUN,
    RESULTS,
    Commands,
    Root,
    RunFile,
    refuse,
)
from pipeline.run_stage import run_stage

if TYPE_CHECKING:
    from pipeline.stage.artifacts import Paths
    from pipeline.start.set_up import Setup

DEFAULT_LIST = Path(__file__).with_name("default_run.json")

app = typer.Typer()
bits = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Which operation two machines disagree on."
)
app.add_typer(bits, name="bits", rich_help_panel=RESULTS)


@bits.command()
def record(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Where to write the record.")],
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    round_: Annotated[int, typer.Option("--round", help="The round.")] = 1,
    peer: Annotated[int, typer.Option(help="The peer whose step it is.")] = 0,
    of: Annotated[
        Literal["step", "merge", "loss", "weights"],
        typer.Option(help="A peer's step, the merge, a loss, or the fresh weights."),
    ] = "step",
    as_peer: Annotated[
        bool, typer.Option(help="As the peer computes, with its fault of the run file.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Another's record, of which the first difference is judged.")
    ] = None,
) -> None:
    """Take a part of a round one operation after the other, and write the hash of each.

    Where it differs from another's record, FILE.dispute states that, for `judge`.
    """
    idle = {"loss": "as_peer", "merge": "as_peer peer", "weights": "as_peer peer round_"}
    refuse(context, idle.get(of, "").split(), f"with --of {of}")
    dispute = file.with_name(f"{file.name}.dispute")
    for place in (file, dispute):
        named_place(place)
    paths, setup = _prepared(run, root)
    trained = paths.need("train")

    from lockstep.transcript.transcript import Transcript
    from parts.bits import record as records
    from parts.bits import statement
    from parts.bits.comparison import first_difference
    from parts.bits.recording import Recording

    theirs = records.read(against) if against else None
    recording = Recording(setup, of, round_, peer, as_peer=as_peer)
    found = recording.record(Transcript(trained / "transcript"), theirs)
    write_named(file, found.model_dump_json() + "\n")
    claim = found.claim
    print(f"record: {file}: {claim.count:,} operations, root {claim.root}, program {claim.program}")
    if theirs and against:
        number, parted = first_difference(theirs, found), recording.recorder.parted
        if number is None or parted is None:
            print(f"record: equal to {against}: every operation has the same bits")
            return
        statement.write(dispute, (theirs, found), number, parted)
        print(f"record: {dispute}: the first claim is {against}, the second {file}")
        _print_verdict(dispute)
        raise typer.Exit(1)


def _prepared(run: Path, root: Path) -> tuple["Paths", "Setup"]:
    """Return where the run is whose bits are looked at, its programs and data; sets JAX up."""
    from pipeline import runfile
    from pipeline.stage import devices
    from pipeline.stage.artifacts import Paths

    paths, settings = Paths("witness", run, root), runfile.load(run)
    init, shards = paths.need("convert"), paths.need("download")
    devices.prepare(settings)  # before JAX is imported
    from pipeline.start import set_up

    devices.keep_compiled(paths.store / "compiled")
    return paths, set_up.read_to_train(settings, init, shards)


@bits.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A record.")],
    second: Annotated[Path, typer.Argument(help="Another of the same part of a round.")],
) -> None:
    """Name the first operation in which two records differ; exit with status 1 if one does."""
    from parts.bits import record as records
    from parts.bits.comparison import first_difference, lines

    both = [records.read(file) for file in (first, second)]
    for line in lines((str(first), str(second)), *both):
        print(shown(line))
    raise typer.Exit(int(first_difference(*both) is not None))


@bits.command()
def judge(
    file: Annotated[Path, typer.Argument(help="What `record --against` wrote of a difference.")],
) -> None:
    """Compute the one operation over which two claims part, and say which of them is right."""
    _print_verdict(file)


def _print_verdict(file: Path) -> None:
    from parts.bits import statement

    for line in statement.lines(statement.judge(file)):
        print(shown(line))


@bits.command()
def check(
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How many; by default all of the file.")
    ] = None,
    file: Annotated[
        Path, typer.Option(help="The list; by default that of the default run.")
    ] = DEFAULT_LIST,
    write: Annotated[bool, typer.Option("--write", help="Write the list anew.")] = False,
) -> None:
    """Train here, and compare the params after each round with a list of their hashes."""
    named_place(file) if write else check_regular_file(file)  # before hours of work
    for stage in ("download", "convert"):
        run_stage(stage, run, root)
    _, setup = _prepared(run, root)

    from parts.bits import rounds as lists

    count = (lists.write if write else lists.check)(file, setup, rounds)
    says = "are listed in" if write else "have the bits of"
    print(f"check: the params after each of {count} rounds {says} {file}")
