"""`lockstep push`, `publish`, `verify` and `replay`.

Nothing heavy is imported before one of them runs.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError, shown
from lockstep.files import named_place
from parts.publication.claims import PUBLISHED_WINDOWS, VerifyOutcome, table
from pipeline.command_options import (
    DEFAULT_ROOT,
    DEFAULT_RUN,
    MOST_GB,
    RESULTS,
    MaxGb,
    Root,
    RunFile,
    check_word,
)

app = typer.Typer()


def _holds_shards(folder: Path | None) -> Path | None:
    if folder is not None and not (folder / "shards.json").is_file():
        raise typer.BadParameter(f"{folder}: found no shards.json there, expected one")
    return folder


WorkerPython = Annotated[
    str,
    typer.Option(help="Python that runs a workload, with its packages: yours, not the author's."),
]
WorkerModule = Annotated[str, typer.Option(metavar="MODULE", help="Module that serves a workload.")]
WorkerPath = Annotated[
    list[str] | None, typer.Option(metavar="FOLDER", help="Where a worker finds modules; repeats.")
]
ReadersSeed = Annotated[
    str | None,
    typer.Option(help="Your word, as `openssl rand -hex 16` prints: draws the windows to repeat."),
]
HowMany = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many windows are drawn to repeat: all published; with --seed, 1."
    ),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Folder of the checkpoint that the run began with, if with one.")
]
OwnData = Annotated[
    Path | None,
    typer.Option(help="Your own data/shards, to compare sequences with.", callback=_holds_shards),
]
AttestFile = Annotated[
    Path | None, typer.Option(help="Write what was verified to this file, as an in-toto statement.")
]
PublicKey = Annotated[
    Path | None, typer.Option(help="The author's public key, in PEM; of volunteers, the lab's KEY.")
]
SigningKey = Annotated[
    Path | None,
    typer.Option("--sign", help="Sign with this private key, in PEM: EC, P-256 for example."),
]
VerifiersKeys = Annotated[
    list[Path] | None, typer.Option("--key", help="A verifier's public key, in PEM; repeats.")
]
Weights = Annotated[list[Path] | None, typer.Option(help="A file of its weights; repeats.")]
Proven = Annotated[
    list[str] | None, typer.Option(metavar="CLAIM", help="A claim that has to be proven; repeats.")
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Of volunteers: a line a round, until the run ends.")
]
Replays = Annotated[
    list[str] | None,
    typer.Option(
        "--replay",
        metavar="PEER:WINDOW",
        help="Of volunteers: a window to repeat, counted from 0, or `drawn`; repeats.",
    ),
]


@app.command(rich_help_panel=RESULTS)
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
    key: SigningKey = None,
) -> None:
    """Upload the accepted export to DEST and to the checkpointers of the run file."""
    from parts.publication import publish as publishing

    publishing.push(run, root, destinations or (), private=private, with_proof=with_proof, key=key)


@app.command(rich_help_panel=RESULTS)
def publish(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")],
    run: RunFile = DEFAULT_RUN,
    root: Root = DEFAULT_ROOT,
    windows: Annotated[
        int, typer.Option(min=1, help="How many windows others can repeat; each is of one peer.")
    ] = PUBLISHED_WINDOWS,
    seed: Annotated[
        str | None,
        typer.Option(
            help="Draw the windows with this too: a reader's, whom the author cannot foresee."
        ),
    ] = None,
    key: SigningKey = None,
) -> None:
    """Write the accepted export into FOLDER, with what others need to check it."""
    from parts.publication import publish as publishing

    check_word(seed)
    publishing.show(folder, run, root, windows, seed, key)


@app.command(epilog=table(), rich_help_panel=RESULTS)
def verify(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, http(s)://..., owner/name on the hub, or the store of volunteers.",
        ),
    ],
    root: Root = DEFAULT_ROOT,
    follow: Follow = False,
    replays: Replays = None,
    seed: ReadersSeed = None,
    windows: HowMany = None,
    checkpoint: Checkpoint = None,
    shards: OwnData = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Repeat the scores of tasks.")] = False,
    key: PublicKey = None,
    max_gb: MaxGb = MOST_GB,
    attempts: Annotated[
        int, typer.Option(min=1, max=100, help="Failures in a row that end a download.")
    ] = 3,
    stall_seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds without 1 KiB that are a failure.")
    ] = 10,
    worker_python: WorkerPython = "",
    worker_module: WorkerModule = "",
    worker_path: WorkerPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    attest: AttestFile = None,
    signing_key: SigningKey = None,
) -> None:
    """Check a publication, or a run of volunteers: follow its params, repeat a sample."""
    from lockstep.machine import allocator
    from parts.publication import in_toto
    from parts.publication import readers_checks as checks
    from pipeline.runfile import Network

    allocator.tune()
    limits = checks.Limits(max_gb, Network(attempts=attempts, stall_seconds=stall_seconds))
    asks = checks.ReaderAsks(seed, windows, checkpoint, shards, tasks, key)
    listings: list[checks.PublicListing] = []
    _check_attest(attest, signing_key)
    try:
        check_word(seed)
        worker = checks.WorkerOfReader(worker_python, worker_module, worker_path)
        verified = checks.verify(context, limits, asks, worker, listings)
        outcome, result, text = verified.outcome, verified.to_json(), verified.text
    except LockstepError as error:
        nothing = {"bitwise": False, "claims": {}, "training": None}
        outcome, result = checks.outcome_of(error), {"reason": str(error)} | nothing
        text = f"{outcome.word}: {error}"
    result = {"verified": not outcome.status, "outcome": outcome.word} | result
    print(json.dumps(result) if as_json else text)
    if attest is not None:
        in_toto.write(attest, listings, asks, outcome, result, signing_key)
    raise typer.Exit(outcome.status)


def _check_attest(path: Path | None, key: Path | None) -> None:
    """Check, before there is anything to write, that an attestation can be written and signed."""
    from parts.publication import signature

    if path is not None and not named_place(path).parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--attest")
    if key is not None and path is None:
        raise typer.BadParameter("expected --attest FILE too", param_hint="--sign")
    if key is not None:
        signature.check_private(key)


@app.command(epilog=table(), rich_help_panel=RESULTS)
def attestation(
    file: Annotated[Path, typer.Argument(help="What `lockstep verify --attest` wrote.")],
    keys: VerifiersKeys = None,
    weights: Weights = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of all windows repeated, at least.")
    ] = 0,
    proven: Proven = None,
    method: Annotated[str | None, typer.Option(help="The method, as a run file names it.")] = None,
    data: Annotated[str | None, typer.Option(help="The data's SHA-256, as `[pins] data`.")] = None,
) -> None:
    """Check an attestation: who signed it, of which weights, and what it says."""
    from parts.publication import in_toto, readers_checks

    due = {n: v for n, v in {"--method": method, "--data": data}.items() if v is not None}
    try:
        said = in_toto.read(file, keys or (), weights or ())
        in_toto.check_asked(said, share, proven or (), due)
    except (LockstepError, OSError) as error:
        print(f"{(outcome := readers_checks.outcome_of(error)).word}: {shown(str(error))}")
        raise typer.Exit(outcome.status) from error
    rows = [f"  - {name}: {shown(json.dumps(value))}" for name, value in said.training.items()]
    first, rest = said.text.split("\n", 1)
    print(first, "its verifier says:", rest, "what was trained, as known as these", sep="\n")
    print(*rows, "not shown here: whose key it is, and that its holder did as it says", sep="\n")
    raise typer.Exit(said.outcome.status)


@app.command(rich_help_panel=RESULTS)
def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A folder in data/verdict/bundles.")
    ],
    max_gb: MaxGb = MOST_GB,
    worker_python: WorkerPython = "",
    worker_module: WorkerModule = "",
    worker_path: WorkerPath = None,
) -> None:
    """Replay a finding from its bundle; exit with status 1 if the finding is not confirmed."""
    from lockstep.machine import allocator
    from parts.publication import readers_checks as checks

    allocator.tune()
    worker = checks.WorkerOfReader(worker_python, worker_module, worker_path)
    try:
        status = checks.replay(folder, max_gb, worker)
    except (LockstepError, OSError) as error:
        if (outcome := checks.outcome_of(error)) is not VerifyOutcome.NOT_FINISHED:
            raise
        print(f"{outcome.word}: {shown(str(error))}", file=sys.stderr)
        status = outcome.status
    raise typer.Exit(status)
