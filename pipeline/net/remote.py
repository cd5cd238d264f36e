"""A file that lies elsewhere, and its bytes by range, whatever its address is of.

`https://` and `http://` are asked as they stand; `gs://bucket/name` is Google Cloud Storage,
`hf://datasets/owner/name@commit/path` the Hugging Face hub; a path is a file of this machine, and
any other address fsspec's.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from pipeline.errors import LockstepError
from pipeline.net import addresses, web
from pipeline.net.redact import hide, said
from pipeline.runfile.network import Broken, Network
from pipeline.runfile.table import Table

PIECE_BYTES = 2**20
OF_FSSPEC = 2**24  # bytes asked of fsspec at once: what a broken connection can cost


class Origin(Table):
    """One version of a file that lies elsewhere."""

    url: str
    """Its address; a path is a file of this machine."""
    size: Annotated[int, Field(ge=0)]
    """Its length in bytes."""
    tag: str | None = None
    """What the server calls this version: an ETag, a generation; None: it does not say."""
    checksum: Annotated[str, Field(pattern=r"^(sha256|git-sha1|md5|crc32c):[0-9a-f]+$")] | None = (
        None
    )
    """What the server says its bytes hash to."""


class Reader(Protocol):
    """Reads one version of a file, by range."""

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop`, in pieces of any size.

        Raises:
          Broken: the connection was cut or stalled, or the server is too busy; what came before is
            right, and one may go on from there.
          LockstepError: the server refuses, or has another version of the file.
        """
        ...


def is_local(origin: Origin) -> bool:
    """Whether it is a file of this machine, which is read where it is."""
    return "://" not in origin.url


def open_origin(origin: Origin, network: Network) -> Reader:
    """A reader of one version of a file; nothing is asked yet."""
    if is_local(origin):
        return LocalReader(origin)
    match origin.url.partition("://")[0]:
        case "http" | "https" | "gs" | "hf":
            return WebReader(origin, network)
        case _:
            return FsspecReader(origin)


class WebReader:
    """Asks a web server for ranges, and sees that they are of this version of the file."""

    def __init__(self, origin: Origin, network: Network):
        self.origin, self.network = origin, network

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        request = addresses.resolve(self.origin.url)  # each time: credentials expire
        # the others' addresses name a version themselves
        tag = self.origin.tag if self.origin.url.startswith("http") else None
        expected = web.Version(self.origin.size, tag)
        return web.read(request, start, stop, expected, self.network)


class LocalReader:
    """Reads a file of this machine."""

    def __init__(self, origin: Origin):
        self.origin = origin

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        path = Path(self.origin.url)
        try:
            with open(path, "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) != self.origin.size:
                    raise LockstepError(
                        f"{path}: found {size} bytes, expected {self.origin.size} as it had before"
                    )
                file.seek(start)
                while start < stop and (piece := file.read(min(PIECE_BYTES, stop - start))):
                    start += len(piece)
                    yield piece
        except OSError as error:
            raise LockstepError(f"{path}: {error.strerror}, expected a file to read") from error
        if start < stop:
            raise LockstepError(f"{path}: cut short while it was read, expected {stop} bytes")


class FsspecReader:
    """Reads through fsspec, whose own file systems find credentials and retry."""

    def __init__(self, origin: Origin):
        self.origin, self.checked = origin, False
        self.files, self.path = addresses.of_fsspec(origin.url)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        name = hide(self.origin.url)
        if not self.checked:
            self._check(name)
        while start < stop:
            end = min(stop, start + OF_FSSPEC)
            try:
                piece = self.files.cat_file(self.path, start=start, end=end)
            except (FileNotFoundError, PermissionError) as error:
                raise LockstepError(f"{name}: {said(error)}, expected a file to read") from None
            except Exception as error:  # of whatever library is behind it
                raise Broken(f"{name}: {said(error)}") from None
            if len(piece) != end - start:
                raise Broken(f"{name}: {len(piece)} bytes came, expected {end - start}")
            start = end
            yield piece

    def _check(self, name: str) -> None:
        """Sees that it is still the version that was listed; ranges cannot be asked of one."""
        try:
            self.files.invalidate_cache()
            found = version_of_fsspec(self.files.info(self.path))
        except FileNotFoundError:
            raise LockstepError(f"{name}: is not there, expected it as it was listed") from None
        except Exception as error:
            raise Broken(f"{name}: {said(error)}") from None
        if found != (self.origin.size, self.origin.tag):
            raise LockstepError(
                f"{name}: found version {found}, expected {(self.origin.size, self.origin.tag)} as "
                "it was listed; run again to read it anew"
            )
        self.checked = True


def version_of_fsspec(about: dict) -> tuple[int, str | None]:
    """The size and the version of what fsspec describes, by the words of its file systems."""
    tag = about.get("ETag") or about.get("etag") or about.get("mtime") or about.get("LastModified")
    return about["size"], None if tag is None else str(tag)
