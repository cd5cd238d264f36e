"""The checks of a reader, from an address or a bundle to the outcome: `verify` and `replay`.

Nothing here imports JAX before it is known what of the machine a run needs.
"""

import dataclasses
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

import typer

from lockstep import __version__
from lockstep.errors import LockstepError, RequestError, UnfinishedError, brief
from parts.publication import fetch, in_toto, layout, signature, temporary_folder
from parts.publication.claims import Verified, VerifyOutcome
from parts.publication.fetch import Limits, PublicListing
from parts.publication.layout import ReaderAsks
from pipeline.audit import unchecked_bundle
from pipeline.audit.unchecked_bundle import WorkerOfReader
from pipeline.command_options import refuse
from pipeline.joints import Joint
from pipeline.net.limits import NetSettings, NotFetchedError, UnreachableError, logging_attempts
from pipeline.recheck.claim import PublicClaim
from pipeline.stage import devices, logs
from pipeline.stage.keys import STAGES

# What a system says of its own disk, folders and memory. A publication can be the cause of others,
# such as a file that is not there.
OF_THIS_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM, errno.ENOTDIR, errno.EEXIST),
}
OF_A_STAGE = re.compile(rf"^({'|'.join(STAGES)}): ", re.MULTILINE)
LONGEST = 1000  # characters of a reason, which may quote a stranger's file
AGAIN = "the same command begins again, and fetches no byte twice"
# The options of `verify` that are read in one case only; in another they are refused.
OF_PUBLICATION = "seed", "windows", "checkpoint", "shards", "tasks", "attest"
OF_WORKLOAD = "worker_python", "worker_module", "worker_path"
OF_VOLUNTEERS = "follow", "replays"
OVER_NETWORK = "attempts", "stall_seconds"


class OffersVerification(Protocol):
    """Runs in a store, of which something is known without a publication."""

    def is_run(self, source: str, network: NetSettings) -> bool:
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
        network: NetSettings,
        max_gb: int,
    ) -> tuple[bool, list[PublicClaim], list[str], str]:
        """Return what `Verified` consists of, of a run in a store."""


STORED_VERIFICATIONS = Joint[OffersVerification]("stored_verification")


# ---- What an error says ----


def outcome_of(error: Exception) -> VerifyOutcome:
    """Return the outcome of a publication whose check ended in this error."""
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


# ---- A bundle ----


@_for_reader()
def replay(folder: Path, max_gb: int, worker: WorkerOfReader) -> int:
    """Replay a bundle, print what it confirms, and return the exit status."""
    devices.prepare(unchecked_bundle.read_run(folder, max_gb, worker))
    from pipeline.audit import bundle

    return bundle.show(folder, max_gb, worker)


# ---- A publication, or a run in a store ----


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
def verify(
    context: typer.Context,
    limits: Limits,
    asks: ReaderAsks,
    worker: WorkerOfReader,
    listings: list[PublicListing],
) -> Verified:
    """Return what is known of a run of volunteers, or else of a publication.

    A web server is asked for a publication first. `listings` as in `verify_publication`.
    """
    asked, stored = context.params, partial(_verify_stored, context, limits)
    source, root = asked["source"], asked["root"]
    if fetch.is_folder(source):
        refuse(context, OVER_NETWORK, "of a folder, from which nothing is fetched")
    published = partial(verify_publication, source, root, limits, asks, worker, listings)
    if asked["follow"] or asked["replays"] or not source.startswith("http"):
        return stored() or published()
    try:
        return published()
    except NotFetchedError as error:
        verified = None if isinstance(error, UnreachableError) else stored()
        if verified is None:
            raise
        return verified


def _verify_stored(context: typer.Context, limits: Limits) -> Verified | None:
    """Return what is known of a run of volunteers; None if the source is something else."""
    asked = context.params
    source, follow, replays = asked["source"], asked["follow"], asked["replays"] or ()
    for part in STORED_VERIFICATIONS if "://" in source else ():
        if part.is_run(source, limits.network):
            idle = OF_PUBLICATION + OF_WORKLOAD
            idle += OVER_NETWORK if source.startswith("file:") else ()
            refuse(context, idle, f"of a run of volunteers in {source}")
            out = sys.stdout
            with redirect_stdout(StagesAgain(sys.stderr)):
                tell = partial(print, file=sys.stderr if asked["as_json"] else out, flush=True)
                say = tell if follow else bool
                how = {"follows": follow, "key": asked["key"], **limits._asdict()}
                try:
                    return Verified(*part.verify(source, asked["root"], replays, say, **how))
                except OSError as error:  # of a store it would be a line of its own
                    raise UnfinishedError(f"{error.filename}: {error.strerror}") from error
    refuse(context, OF_VOLUNTEERS, f"of {source}, which is no run of volunteers")
    return None


def verify_publication(
    source: str,
    root: Path,
    limits: Limits,
    asks: ReaderAsks,
    worker: WorkerOfReader | None = None,
    listings: list[PublicListing] | None = None,
) -> Verified:
    """Return what is known of a publication; everything printed goes to stderr.

    Once found, it is appended to `listings`, whatever the checks find.
    """
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
