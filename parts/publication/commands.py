"""`lockstep push`, `publish`, `verify` and `replay`.

Nothing heavy is imported before one of them runs.
"""

import dataclasses
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

import typer

from lockstep import __version__
from lockstep.errors import LockstepError, RequestError, UnfinishedError, brief, shown
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
    refuse,
)
from pipeline.joints import Joint
from pipeline.stage.keys import STAGES

if TYPE_CHECKING:
    from parts.publication.claims import Verified
    from parts.publication.fetch import Limits, PublicListing
    from parts.publication.layout import ReaderAsks
    from pipeline.audit.unchecked_bundle import WorkerOfReader
    from pipeline.net.limits import NetSettings
    from pipeline.recheck.claim import PublicClaim

app = typer.Typer()


class OffersVerification(Protocol):
    """Runs in a store, of which something is known without a publication.

    OPTIONS: The options of `lockstep verify` that are about such a run.
    """

    OPTIONS: Collection[str]

    def is_run(self, source: str, network: "NetSettings") -> bool:
        """Return whether an address is that of a run in a store, to be verified."""

    def verify(  # noqa: PLR0913
        self,
        source: str,
        root: Path,
        replays: Sequence[str],
        say: Callable[[str], object],
        *,
        follows: bool,
        key: Path | None,
        network: "NetSettings",
        max_gb: int,
    ) -> tuple[bool, list["PublicClaim"], list[str], str]:
        """Return what `Verified` consists of, of a run in a store."""


STORED_VERIFICATIONS = Joint[OffersVerification]("stored_verification")

# What a system says of its own disk, folders and memory. A publication can be the cause of others,
# such as a file that is not there.
OF_THIS_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM, errno.ENOTDIR, errno.EEXIST),
}
DECIDED = (VerifyOutcome.VERIFIED, VerifyOutcome.CONSISTENT, VerifyOutcome.CONTRADICTED)
OF_A_STAGE = re.compile(rf"^({'|'.join(STAGES)}): ", re.MULTILINE)
LONGEST = 1000  # characters of a reason, which may quote a stranger's file


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
AGAIN = "the same command begins again, and fetches no byte twice"


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
    from parts.publication.fetch import Limits
    from parts.publication.layout import ReaderAsks
    from pipeline.audit import unchecked_bundle
    from pipeline.runfile import Network

    allocator.tune()
    limits = Limits(max_gb, Network(attempts=attempts, stall_seconds=stall_seconds))
    asks = ReaderAsks(seed, windows, checkpoint, shards, tasks, key)
    listings: list[PublicListing] = []
    _check_attest(attest, signing_key)
    try:
        check_word(seed)
        worker = unchecked_bundle.WorkerOfReader(worker_python, worker_module, worker_path)
        published = partial(_verify, source, root, limits, asks, worker, listings)
        verified = _verify_source(context, limits, published)
        outcome, result, text = verified.outcome, verified.to_json(), verified.text
    except LockstepError as error:
        nothing = {"bitwise": False, "claims": {}, "training": None}
        outcome, result = _outcome(error), {"reason": str(error)} | nothing
        text = f"{outcome.word}: {error}"
    result = {"verified": not outcome.status, "outcome": outcome.word} | result
    print(json.dumps(result) if as_json else text)
    if attest is not None:
        _attest(attest, listings, asks, outcome, result, signing_key)
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


def _attest(
    path: Path,
    listings: "list[PublicListing]",
    asks: "ReaderAsks",
    outcome: VerifyOutcome,
    result: dict[str, Any],
    signing_key: Path | None,
) -> None:
    """Write the outcome of `verify`, unless nothing was decided."""
    if outcome not in DECIDED or not listings:
        print(f"verify: {path}: not written, since nothing was decided", file=sys.stderr)
        return
    from parts.publication import in_toto

    in_toto.write(path, listings[0], asks, outcome, result, signing_key)


@app.command(epilog=table(), rich_help_panel=RESULTS)
def attestation(
    file: Annotated[Path, typer.Argument(help="What `lockstep verify --attest` wrote.")],
    keys: VerifiersKeys = None,
    weights: Weights = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of all windows repeated, at least.")
    ] = 0,
    proven: Proven = None,
    method: Annotated[str, typer.Option(help="The method, as a run file names it.")] = "",
    data: Annotated[str, typer.Option(help="The data's SHA-256, as `[pins] data`.")] = "",
) -> None:
    """Check an attestation: who signed it, of which weights, and what it says."""
    from parts.publication import in_toto

    due = {name: value for name, value in (("--method", method), ("--data", data)) if value}
    try:
        said = in_toto.read(file, keys or (), weights or ())
        in_toto.check_asked(said, share, proven or (), due)
    except (LockstepError, OSError) as error:
        print(f"{(outcome := _outcome(error)).word}: {shown(str(error))}")
        raise typer.Exit(outcome.status) from error
    rows = [f"  - {name}: {shown(json.dumps(value))}" for name, value in said.training.items()]
    first, rest = said.text.split("\n", 1)
    print(first, "its verifier says:", rest, "what was trained, as known as these", sep="\n")
    print(*rows, "not shown here: whose key it is, and that its holder did as it says", sep="\n")
    raise typer.Exit(said.outcome.status)


def _outcome(error: Exception) -> VerifyOutcome:
    """Return the outcome of a publication whose check ended in this error."""
    from pipeline.net.limits import NotFetchedError

    if isinstance(error, RequestError):
        return VerifyOutcome.NOT_ASKED
    if isinstance(error, NotFetchedError):
        return VerifyOutcome.NOT_FETCHED
    cause: BaseException | None = error
    while cause is not None:
        if _is_of_this_machine(cause):
            return VerifyOutcome.NOT_FINISHED
        cause = cause.__cause__
    return VerifyOutcome.CONTRADICTED


def _is_of_this_machine(error: BaseException) -> bool:
    """Return whether `verify`'s error says something of this machine alone."""
    if isinstance(error, RuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)  # as XLA says it
    if isinstance(error, OSError):
        return error.errno in OF_THIS_MACHINE
    return isinstance(error, MemoryError | UnfinishedError)


@contextmanager
def _for_reader() -> Iterator[None]:
    """Leave out lines of XLA's own in `verify`, and say in one line that memory ran out."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it raises what is an error here
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_this_machine(error):
            raise
        line, *_ = str(error).splitlines() or ["Python had none left"]
        raise UnfinishedError(f"out of memory: {line}") from error


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
    from pipeline.audit import unchecked_bundle

    allocator.tune()
    worker = unchecked_bundle.WorkerOfReader(worker_python, worker_module, worker_path)
    try:
        status = _replay(folder, max_gb, worker)
    except (LockstepError, OSError) as error:
        if (outcome := _outcome(error)) is not VerifyOutcome.NOT_FINISHED:
            raise
        print(f"{outcome.word}: {shown(str(error))}", file=sys.stderr)
        status = outcome.status
    raise typer.Exit(status)


@_for_reader()
def _replay(folder: Path, max_gb: int, worker: "WorkerOfReader") -> int:
    from pipeline.audit import unchecked_bundle
    from pipeline.stage import devices

    devices.prepare(unchecked_bundle.read_run(folder, max_gb, worker))
    from pipeline.audit import bundle

    return bundle.show(folder, max_gb, worker)


class StagesAgain(io.TextIOBase):
    """Writes what stages print, as lines of `verify`, which makes their results again."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        """Write text of `verify`, whose lines may begin with a stage's name."""
        return self._file.write(OF_A_STAGE.sub(r"verify: \1 again: ", text))

    def flush(self) -> None:
        """Write what of `verify`'s text is held back."""
        self._file.flush()


@_for_reader()
def _verify_source(
    context: typer.Context, limits: "Limits", published: Callable[[], "Verified"]
) -> "Verified":
    """Return what is known of a run of volunteers, or else of a publication.

    A web server is asked for a publication first.
    """
    from pipeline.net.limits import NotFetchedError, UnreachableError

    asked, stored = context.params, partial(_verify_stored, context, limits)
    if asked["follow"] or asked["replays"] or not asked["source"].startswith("http"):
        return stored() or published()
    try:
        return published()
    except NotFetchedError as error:
        verified = None if isinstance(error, UnreachableError) else stored()
        if verified is None:
            raise
        return verified


def _verify_stored(context: typer.Context, limits: "Limits") -> "Verified | None":
    """Return what is known of a run of volunteers; None if the source is something else."""
    from parts.publication.claims import Verified

    asked, network = context.params, limits.network
    source, follow, replays = asked["source"], asked["follow"], asked["replays"] or ()
    for part in STORED_VERIFICATIONS:
        if part.is_run(source, network):
            refuse(
                context, {*asked} - {"source", *part.OPTIONS}, f"of a run of volunteers: {source}"
            )
            out = sys.stdout
            with redirect_stdout(StagesAgain(sys.stderr)):
                tell = partial(print, file=sys.stderr if asked["as_json"] else out, flush=True)
                say = tell if follow else bool
                how = {"follows": follow, "key": asked["key"], **limits._asdict()}
                try:
                    return Verified(*part.verify(source, asked["root"], replays, say, **how))
                except OSError as error:  # of a store it would be a line of its own
                    raise UnfinishedError(f"{error.filename}: {error.strerror}") from error
    if follow or replays:
        raise RequestError(
            f"{source}: not a run of volunteers, expected one for --follow or --replay"
        )
    return None


def _verify(
    source: str,
    root: Path,
    limits: "Limits",
    asks: "ReaderAsks",
    worker: "WorkerOfReader | None" = None,
    listings: "list[PublicListing] | None" = None,
) -> "Verified":
    """Return what is known of a publication; everything printed goes to stderr.

    Once found, it is appended to `listings`, whatever the checks find.
    """
    from parts.publication import fetch, in_toto, layout, signature, temporary_folder
    from pipeline.audit import unchecked_bundle
    from pipeline.net.limits import logging_attempts
    from pipeline.stage import devices, logs

    logs.to_stdout("WARNING")
    data, folder, place = root / "data", None, None
    try:
        with redirect_stdout(sys.stderr), logging_attempts():
            listing = fetch.find(source, data / "store", limits, signed=asks.key is not None)
            if listings is not None:
                listings.append(listing)
            signed = signature.check(listing.signature, listing.digests, asks.key)
            publication = listing.publication
            skip = layout.not_needed(publication, layout.choose(publication, asks))
            with (
                temporary_folder.folder(data / "runs", "verify", AGAIN) as place,
                listing.bring(place, skip) as folder,
                _release_said(publication.release),
            ):
                run = unchecked_bundle.read_run(folder / layout.PROOF, limits.max_gb, worker)
                if precision := layout.matmul_precision(folder):
                    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", precision)
                devices.prepare(run)
                from parts.publication import verify as verifying
                from pipeline.recheck.published import ReaderFiles

                own = ReaderFiles(asks.checkpoint, asks.shards, asks.tasks, place, data / "store")
                most = limits.max_gb
                verified = verifying.verify(folder, publication, run, asks, own, most)
                return dataclasses.replace(
                    verified, claims=[*in_toto.claims(listing), signed, *verified.claims]
                )
    except (LockstepError, OSError) as error:
        text = re.sub(r"/proc/\d+/fd/\d+/", "", str(error))  # of a folder that is read in place
        for where in (place and place / "unpacked", folder):
            if where not in (None, Path()):  # names files as the publication does
                text = text.replace(f"{where}/", "")
        kind = type(error) if isinstance(error, LockstepError) else LockstepError
        raise kind(brief(text, LONGEST)) from error
    except RecursionError as error:  # a stranger's lists, hundreds deep
        raise LockstepError(f"{source}: {error}, expected less deeply nested lists") from error


@contextmanager
def _release_said(release: str) -> Iterator[None]:
    """Make an error say which release can read a publication, if it is another one."""
    try:
        yield
    except LockstepError as error:
        if release == __version__:
            raise
        raise type(error)(
            f"{error}; it was published by release {brief(release)}, and this is {__version__}"
        ) from error
