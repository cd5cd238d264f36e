"""`lockstep publish` and `lockstep verify`; nothing heavy is imported before one of them runs."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import LockstepError, brief, shown
from pipeline.stage.keys import RUN_FILE

LONGEST = 1000  # characters of a reason, which may quote a stranger's file
RunFile = Annotated[Path, typer.Option("--run", help="The run file.")]
Root = Annotated[Path, typer.Option("--root", help="The folder where data/ and metrics/ lie.")]
Seed = Annotated[
    str | None,
    typer.Option(
        help="Draw the windows with this too: a reader's, whom the author cannot foresee."
    ),
]


def publish(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")],
    run: RunFile = Path(RUN_FILE),
    root: Root = Path(),
    windows: Annotated[
        int, typer.Option(min=1, help="How many windows others can repeat: the last, and others.")
    ] = 1,
    seed: Seed = None,
) -> None:
    """Write the accepted export into FOLDER, with what others need to check it."""
    from pipeline.publication import publish as publishing

    publishing.show(folder, run, root, windows, seed)


def verify(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A folder, http(s)://... or owner/name on the hub."),
    ],
    root: Root = Path(),
    seed: Seed = None,
    max_gb: Annotated[
        int, typer.Option(min=1, help="The most that the publication's files may have together.")
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a publication and repeat its sample; exit with status 1 if anything contradicts it."""
    from pipeline.stage import allocator

    allocator.tune()
    reason, said = None, {}
    try:
        proven = _verify(source, root / "data" / "store", seed, max_gb)
        said, line = proven._asdict(), proven.line()
    except LockstepError as error:
        reason = str(error)
        line = f"not verified: {reason}"
    if as_json:
        print(json.dumps({"proven": reason is None, "reason": reason} | said))
    else:
        print(shown(line))
    raise typer.Exit(0 if reason is None else 1)


def _verify(source: str, cache: Path, seed: str | None, max_gb: int):
    from pipeline.audit import bundle_files
    from pipeline.publication import fetch
    from pipeline.publication.layout import PROOF
    from pipeline.stage import devices
    from pipeline.stage.artifacts import writes

    place = cache if "://" in source or not Path(source).is_dir() else None  # files are linked
    if place is not None:
        with writes(place):
            place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=place) as name:
        folder = Path(name)
        try:
            publication = fetch.fetch(source, folder, cache, max_gb)
            run = bundle_files.read_run(folder / PROOF, max_gb)
            devices.prepare(run)
            from pipeline.publication import verify as verifying

            return verifying.verify(folder, publication, run, seed)
        except (LockstepError, OSError) as error:  # names files as the publication does
            raise LockstepError(brief(str(error).replace(f"{folder}/", ""), LONGEST)) from error
