"""Downloads into the content store: parallel, resumable, verified.

    store/files/ab/<id>.<sha256>   a file; the id is a hash of its address and version
    store/files/ab/<id>.part       its first bytes, which are not fetched again
    store/listings/<id>.json       what a location had when it was last asked

A file of the hub that its own client has in its cache is copied from there, not fetched.
A file gets its final name once its size, and its checksum where the server gives one, are right.
Its own SHA-256 is part of that name, so damage on the disk is noticed too. Nothing is flushed to
the disk: a killed process loses nothing, and after a power cut the hashes tell.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple

from .. import remote, web
from ..errors import NetError
from ..limits import (
    Bar,
    CancelledError,
    FetchLimit,
    NetSettings,
    UnnamedVersionError,
    UnreachableError,
)
from ..origin import READ_BYTES, AnyRecord, Origin, hash_file, hasher, parse, validate

log = logging.getLogger(__name__)

DAMAGED = 2  # times that a file may arrive with a wrong checksum


class Transfer(NamedTuple):
    """A file to fetch into the store: its name, origin, and how many of its first bytes.

    `author` is who gave the checksum of the origin.
    """

    name: str
    origin: Origin
    size: int
    author: str = "the server"


class StoredFile(NamedTuple):
    """A file in the store: its path, and the SHA-256 of the bytes asked for.

    The file may be longer, where only its first bytes were asked for. A file of this machine stays
    where it is, and has no hash yet: it may change until it is read.
    """

    path: Path
    sha256: str | None


def fetch(
    transfers: Sequence[Transfer], store: Path, network: NetSettings, bar: Bar
) -> list[StoredFile]:
    """Fetch the files that are not in the store yet; return a file for each transfer, in order.

    The bar advances by bytes, each counted once, those in the store included.

    Raises:
      BadRequestError: They are more than a `FetchLimit` allows.
    """
    far = [transfer for transfer in transfers if not transfer.origin.is_local]
    FetchLimit.count({transfer.origin.url: transfer.size for transfer in far})
    stop = Event()
    with ThreadPoolExecutor(network.connections, thread_name_prefix="fetch") as pool:
        jobs = [
            pool.submit(_Fetch(transfer, store, network, bar, stop).run) for transfer in transfers
        ]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # one failed, or this thread was interrupted: the others need not go on
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    errors = (job.exception() for job in jobs if not job.cancelled())
    for error in errors:
        if error and not isinstance(error, CancelledError):
            raise error
    return [job.result() for job in jobs]


def remembered(
    store: Path, kind: type[AnyRecord], full_name: str, where: str, ask: Callable[[], AnyRecord]
) -> AnyRecord:
    """Return what `ask` lists and keep it in the store; offline, return what is kept, if it is.

    `full_name` is that of what is listed, and `where` the same in errors.
    """
    path = store / "listings" / f"{hashlib.sha256(full_name.encode()).hexdigest()[:40]}.json"
    if web.offline() and path.is_file():
        return validate(kind, parse(path.read_bytes(), str(path)), str(path))
    try:
        listing = ask()
    except UnreachableError as error:
        if not web.offline():
            raise
        raise UnreachableError(
            f"{where}: {web.OFFLINE} is set, expected a stored listing; "
            f"{path.parent} has no listing of it"
        ) from error
    if not web.offline():  # then it is of the hub client's cache, which may be filled later
        _write(path, listing.model_dump_json(indent=1) + "\n")
    return listing


def link_files(files: Mapping[str, StoredFile], folder: Path) -> None:
    """Put files of the store into a folder, by their names; several processes may at once."""
    with _writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, stored in files.items():
            path = folder / name
            if path.is_symlink() or not (path.exists() and path.samefile(stored.path)):
                (temp := folder / f".{name}.{os.getpid()}.part").unlink(missing_ok=True)
                _link(stored.path, temp)
                temp.replace(path)  # replaces one that others may be reading


def forget(store: Path, hashes: Iterable[str]) -> None:
    """Remove files from the store by their SHA-256, since their content turned out wrong."""
    hashes = set(hashes)
    for path in (store / "files").glob("*/*.*"):
        # a file that is used in part is stored in part
        sha256 = hash_file(path) if path.suffix == ".part" else path.suffix[1:]
        if sha256 in hashes:
            path.unlink()


@dataclass
class _Fetch:
    """One transfer into the store: what is there, and what is fetched into a partial file."""

    transfer: Transfer
    store: Path
    network: NetSettings
    bar: Bar
    stop: Event
    furthest: int = 0  #: Offset to which the bar was advanced, which never goes back.

    def run(self) -> StoredFile:
        origin, size = self.transfer.origin, self.transfer.size
        if origin.is_local:
            path = Path(origin.url)
            if not os.access(path, os.R_OK):
                raise NetError(f"{path}: no permission, expected a readable file")
            self._count(size)
            return StoredFile(path, None)
        identity = json.dumps([origin.url, origin.size, origin.tag, origin.checksum])
        name = hashlib.sha256(identity.encode()).hexdigest()[:40]
        folder = self.store / "files" / name[:2]
        with _writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
            while (stored := self._find(folder, name)) is None:
                path = folder / f"{name}.part"
                with _locked(path, self.stop) as part:
                    if part is None:  # another process finished it meanwhile
                        continue
                    self._take_from_hub_cache(part)
                    sha256 = self._fill(part)
                    if size == origin.size:
                        path = path.rename(folder / f"{name}.{sha256}")
                    return StoredFile(path, sha256)
            self._count(size)
            return stored

    def _count(self, offset: int) -> None:
        if offset > self.furthest:
            self.bar.advance(offset - self.furthest)
            self.furthest = offset

    def _find(self, folder: Path, name: str) -> StoredFile | None:
        """Return the stored file if it was fetched before and is undamaged."""
        for entry in os.listdir(folder):  # a few; a pattern would take longer than the rest
            start, _, expected = entry.partition(".")
            if start != name or expected == "part":
                continue
            path = folder / entry
            if not path.is_symlink() and hash_file(path) == expected:
                if self.transfer.size < self.transfer.origin.size:
                    expected = hash_file(path, size=self.transfer.size)
                return StoredFile(path, expected)
            again = f"{self.transfer.name} is fetched again"
            log.warning(f"download: warning: {path} was damaged, {again}")
            path.unlink()
        return None

    def _take_from_hub_cache(self, part: BinaryIO) -> None:
        """Copy what the hub's own client has fetched; a whole file is verified like any other."""
        origin, done = self.transfer.origin, os.fstat(part.fileno()).st_size
        if origin.checksum is None or (done and self.transfer.size == origin.size):
            return
        path = remote.in_hub_cache(origin)
        with suppress(OSError):  # it may go at any time; what is there of it is completed
            if path is not None:
                with open(path, "rb") as file:
                    file.seek(done)
                    for piece in _pieces(file, self.transfer.size - done):
                        part.write(piece)

    def _fill(self, part: BinaryIO) -> str:
        """Fetch a stored file's missing bytes, verify the whole, and return its SHA-256."""
        origin, size = self.transfer.origin, self.transfer.size
        # the checksum is of the whole file
        expected = origin.checksum if size == origin.size else None
        kind = expected.partition(":")[0] if expected else "sha256"
        damaged, attempts = 0, 1
        while damaged < DAMAGED:
            digests = {name: hasher(name, size) for name in {"sha256", kind}}
            try:
                self._complete(part, digests, checked=bool(expected) and kind == "sha256")
            except UnnamedVersionError:
                if attempts >= self.network.attempts:
                    raise
                attempts += 1
                part.truncate(0)  # what came before may be of another version than the rest
                continue
            received = f"{kind}:{digests[kind].digest().hex()}"
            if expected in (None, received):
                return digests["sha256"].hexdigest()
            damaged += 1
            part.truncate(0)
        raise NetError(
            f"{self.transfer.name}: received {received}, expected {expected} as "
            f"{self.transfer.author} says, {DAMAGED} times; the damaged copy is removed"
        )

    def _complete(self, part: BinaryIO, digests: dict[str, Any], *, checked: bool) -> None:
        """Fetch a stored file's missing bytes, and hash all of it; `checked` as in `read`."""
        size, done = self.transfer.size, 0
        part.seek(0)
        for piece in _pieces(part, size):
            for digest in digests.values():
                digest.update(piece)
            done += len(piece)
        self._count(done)
        arguments = (self.transfer.origin, done, size, self.network, self.stop)
        for piece in remote.read(*arguments, is_only_read=True, checked=checked):
            part.write(piece)
            for digest in digests.values():
                digest.update(piece)
            done += len(piece)
            self._count(done)


@contextmanager
def _locked(path: Path, stop: Event) -> Iterator[BinaryIO | None]:
    """Open a partial file of the store, locked; None if its last holder finished it."""
    with open(path, "a+b", buffering=0, opener=_no_link) as part:
        while True:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(0.1):
                    raise CancelledError from None
        same = path.exists() and os.path.samestat(os.fstat(part.fileno()), path.stat())
        yield part if same else None


def _pieces(file: BinaryIO, left: int) -> Iterator[bytes]:
    """Yield the next bytes of a file for the store, at most so many."""
    while left and (piece := file.read(min(READ_BYTES, left))):
        left -= len(piece)
        yield piece


# ---- Files ----


@contextmanager
def _writes(path: Path) -> Iterator[None]:
    """Name the store's `path` in the error if the system refuses to write it: a full disk."""
    try:
        yield
    except OSError as error:
        raise NetError(f"{path}: {error.strerror}, expected to write there") from error


def _write(path: Path, text: str) -> None:
    """Write a file of the store that is complete or absent after a kill."""
    with _writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f".{path.name}.{os.getpid()}.part")
        temp.write_text(text, encoding="utf-8")
        os.replace(temp, path)


def _link(source: Path, target: Path) -> None:
    """Make a hard link to a file of the store, or a copy if the system cannot link."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _no_link(path: str, flags: int) -> int:
    """Open a file of the store unless it is a link: others may have been in the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
