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

from pipeline.errors import LockstepError
from pipeline.net import addresses, fsspec_files, web
from pipeline.net.redact import hide
from pipeline.net.retry import Attempts, TransientError
from pipeline.runfile import Network
from pipeline.runfile.table import Table

PIECE_BYTES = 2**20


class Origin(Table):
    """One version of a file: where its bytes come from."""

    url: str
    """Address; a path is a file of this machine."""
    size: Annotated[int, Field(ge=0)]
    """Length in bytes."""
    tag: str | None = None
    """The server's name of this version: an ETag, a generation; None without one."""
    checksum: Annotated[str, Field(pattern=r"^(sha256|git-sha1|md5|crc32c):[0-9a-f]+$")] | None = (
        None
    )
    """The server's checksum of its bytes."""

    @property
    def is_local(self) -> bool:
        """Whether it is a file of this machine, which is read in place."""
        return "://" not in self.url


def read(
    origin: Origin, start: int, stop: int, network: Network, cancelled: Event | None = None
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop`, in pieces; a broken connection is resumed.

    Raises:
      LockstepError: the server refuses, has another version of the file, or failed too often.
      CancelledError: `cancelled` was set.
    """
    attempts = Attempts(network, cancelled)
    attempts.check()
    while start < stop:
        try:
            for piece in read_once(origin, start, stop, network):
                attempts.check()
                start += len(piece)
                if start > stop:
                    raise LockstepError(
                        f"{hide(origin.url)}: {start - stop} bytes more than requested, expected "
                        f"them up to offset {stop}"
                    )
                if piece:
                    attempts.progressed()
                yield piece
            if start < stop:
                raise TransientError(f"{hide(origin.url)}: the answer ended early")
        except TransientError as error:
            attempts.failed(
                error,
                f"{stop - start} more bytes within {network.attempts} attempts; run again to "
                "resume",
            )


def read_once(origin: Origin, start: int, stop: int, network: Network) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop`, in pieces, without a second attempt.

    Raises:
      TransientError: the connection was cut or stalled, or the server is busy; the pieces so far
        are right.
      LockstepError: the server refuses, or has another version of the file.
    """
    if origin.is_local:
        return _read_local(origin, start, stop)
    scheme = origin.url.partition("://")[0]
    if scheme not in ("http", "https", "gs", "hf"):
        return fsspec_files.read(origin.url, start, stop, (origin.size, origin.tag))
    request = addresses.resolve(origin.url)  # each time: credentials expire
    # addresses of clouds name the version themselves
    tag = origin.tag if scheme.startswith("http") else None
    return web.read(request, start, stop, web.Version(origin.size, tag), network)


def _read_local(origin: Origin, start: int, stop: int) -> Iterator[bytes]:
    path = Path(origin.url)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != origin.size:
                raise LockstepError(f"{path}: {size} bytes, expected {origin.size} as before")
            file.seek(start)
            while start < stop and (piece := file.read(min(PIECE_BYTES, stop - start))):
                start += len(piece)
                yield piece
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected a readable file") from error
    if start < stop:
        raise LockstepError(f"{path}: cut short while it was read, expected {stop} bytes")
