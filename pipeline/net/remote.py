"""Bytes of one version of a file, wherever it is: on a web server, a cloud, or this machine.

`https://` and `http://` go to the server as they stand; `gs://bucket/name` is Google Cloud Storage,
`hf://datasets/owner/name@commit/path` the Hugging Face hub; a path is a file of this machine, and
fsspec reads every other address.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Annotated

from pydantic import Field

from lockstep.errors import LockstepError, hide
from lockstep.tables.table import Table
from pipeline.net import addresses, fsspec_files, limits, web
from pipeline.net.retry import Attempts, TransientError
from pipeline.runfile import Network
from pipeline.stage.given_files import stamp, stamp_of

VERSIONED = ("gs", "hf")  # schemes whose addresses name the version of a file


class Origin(Table):
    """One version of a file: where its bytes come from."""

    url: str
    """Address; a path is a file of this machine."""
    size: Annotated[int, Field(ge=0)]
    """Length in bytes."""
    tag: str | None = None
    """The server's name of this version: an ETag, a generation; of a file of this machine, the
    time of its last change in nanoseconds; None without one."""
    checksum: Annotated[str, Field(pattern=r"^(sha256|git-sha1|md5|crc32c):[0-9a-f]+$")] | None = (
        None
    )
    """The server's checksum of its bytes."""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine and read in place."""
        return "://" not in self.url

    @property
    def is_addressed(self) -> bool:
        """Whether the address names the version, so that no answer can be of another."""
        return self.url.partition("://")[0] in VERSIONED


def read(
    origin: Origin,
    start: int,
    stop: int,
    network: Network,
    cancelled: Event | None = None,
    *,
    whole: bool = False,
    checked: bool = False,
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop`, in pieces; a broken connection is resumed.

    A part of a file of the hub is read from the cache of its client, if that has the file. `whole`
    says that nothing is read of the file but what this yields. Then the first answer may be
    of any one version; every other answer must name the version, or they could be of several.
    `checked` says that a SHA-256 of the whole decides in the end: then no answer need name it.

    Raises:
      UnnamedVersionError: an answer that must name its version does not.
      LockstepError: the server refuses, has another version of the file, or failed too often.
      CancelledError: `cancelled` was set.
    """
    if not whole and (cached := addresses.in_hub_cache(origin.url, origin.size)) is not None:
        tag = str(stamp(cached).nanoseconds)
        yield from _read_local(Origin(url=str(cached), size=origin.size, tag=tag), start, stop)
        return
    attempts = Attempts(network, cancelled)
    attempts.check()
    while start < stop:
        try:
            is_rest, begun = (start > 0 or not whole) and not checked, start
            for piece in read_once(origin, start, stop, network, is_rest):
                attempts.check()
                start += len(piece)
                if start > stop:
                    raise LockstepError(
                        f"{hide(origin.url)}: {start - stop} bytes more than requested, expected "
                        f"them up to offset {stop}"
                    )
                yield piece
            if start < stop:
                raise TransientError(f"{hide(origin.url)}: the answer ended early")
        except TransientError as error:
            if start - begun >= min(limits.LEAST_BYTES, (stop - begun) / 2):  # no drip
                attempts.progressed()
            attempts.failed(
                error,
                f"{stop - start} more bytes within {network.attempts} attempts; run again to "
                "resume",
            )


def read_once(
    origin: Origin, start: int, stop: int, network: Network, is_rest: bool
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop`, in pieces, without a second attempt.

    `is_rest` says whether the answer must name the version of the file.

    Raises:
      TransientError: the connection was cut or stalled, or the server is busy; the pieces so far
        are right.
      UnnamedVersionError: it must name the version, and does not.
      LockstepError: the server refuses, or has another version of the file.
    """
    if origin.is_local:
        return _read_local(origin, start, stop)
    scheme = origin.url.partition("://")[0]
    if scheme not in ("http", "https", "gs", "hf"):
        listed = (origin.size, origin.tag)
        return fsspec_files.read(origin.url, start, stop, listed, network, is_rest=is_rest)
    request = addresses.resolve(origin.url)  # each time: credentials expire
    tag = None if origin.is_addressed else origin.tag
    version = web.Version(origin.size, tag, is_addressed=origin.is_addressed)
    return web.read(request, start, stop, version, network, is_rest=is_rest)


def _read_local(origin: Origin, start: int, stop: int) -> Iterator[bytes]:
    path = Path(origin.url)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while start < stop and (piece := file.read(min(web.PIECE_BYTES, stop - start))):
                found = stamp_of(os.fstat(file.fileno()))  # after the read, to hold for it
                if (found.size, str(found.nanoseconds)) != (origin.size, origin.tag):
                    raise LockstepError(
                        f"{path}: changed since it was listed: {found.size} bytes of time "
                        f"{found.nanoseconds}, expected {origin.size} of {origin.tag}; run again "
                        "to read it anew"
                    )
                start += len(piece)
                yield piece
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected a readable file") from error
    if start < stop:
        raise LockstepError(f"{path}: cut short while it was read, expected {stop} bytes")
