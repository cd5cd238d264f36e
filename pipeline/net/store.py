"""Files fetched into the store: several at once, gone on with where they stopped, and verified.

    store/files/ab/<id>.<sha256>   a file; the id is a hash of its address and version
    store/files/ab/<id>.part       its first bytes, in order: what is there is not fetched again

A file takes its last name when its size, and its checksum where the server gives one, are found
right. Its own SHA-256 stands in that name, so a file that changed on the disk is found too. Nothing
is flushed to the disk: a killed process loses nothing, and after a power cut the hashes tell.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.errors import LockstepError
from pipeline.net import addresses, remote
from pipeline.net.remote import Origin
from pipeline.runfile.network import Broken, Network, Patience
from pipeline.stage.artifacts import sha256_file, writes
from pipeline.stage.progress import Progress

log = logging.getLogger(__name__)

READ_BYTES = 2**20
DAMAGED = 2  # times that a whole file may come with another checksum


class Wish(NamedTuple):
    """A file that is wanted: what errors call it, where it is, and how many of its first bytes."""

    name: str
    origin: Origin
    size: int


class Kept(NamedTuple):
    """A file in the store: the path, and the SHA-256 of the bytes that were wished for.

    The file at the path may be longer, where only its first bytes were wished for.
    """

    path: Path
    sha256: str


class Stopped(Exception):
    """Another file failed, or the process is to end."""


def fetch(wishes: Sequence[Wish], store: Path, network: Network, bar: Progress) -> list[Kept]:
    """Sees that these files are in the store.

    Args:
      wishes: the files.
      store: a folder; it is made.
      network: how many at once, and how patiently.
      bar: moves by bytes, each once, also those that were there already.

    Returns:
      One for each wish, in order.

    Raises:
      LockstepError: a server refuses, gives up, or has other bytes than it says; names the file.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(network.connections, thread_name_prefix="fetch") as pool:
        jobs = [pool.submit(_fetch, wish, store, network, bar, stop) for wish in wishes]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # one failed, or this thread is told to end: the others need not go on
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    for job in jobs:
        if not job.cancelled() and (error := job.exception()) and not isinstance(error, Stopped):
            raise error
    return [job.result() for job in jobs]


def forget(store: Path, hashes: Iterable[str]) -> None:
    """Removes files from the store, by their SHA-256: what came was not what should have come."""
    hashes = set(hashes)
    for path in (store / "files").glob("*/*.*"):
        # of a file that is used in part, the store has that part
        found = sha256_file(path) if path.suffix == ".part" else path.suffix[1:]
        if found in hashes:
            path.unlink()


def _fetch(wish: Wish, store: Path, network: Network, bar: Progress, stop: threading.Event) -> Kept:
    origin = wish.origin
    count = _count(bar, wish.size)
    if remote.is_local(origin):
        count(wish.size)
        return Kept(Path(origin.url), _sha256(Path(origin.url), wish.size))
    url = addresses.without_user(origin.url)
    identity = json.dumps([url, origin.size, origin.tag, origin.checksum])
    name = hashlib.sha256(identity.encode()).hexdigest()[:40]
    folder = store / "files" / name[:2]
    with writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if kept := _find(folder, name, wish):
            count(wish.size)
            return kept
        with _alone(folder / f"{name}.part", stop) as part:
            if part is None:  # another process made it meanwhile
                return _fetch(wish, store, network, bar, stop)
            sha256 = _fill(wish, part, network, count, stop)
            path = folder / f"{name}.part"
            if wish.size == origin.size:
                path = path.rename(folder / f"{name}.{sha256}")
            return Kept(path, sha256)


def _find(folder: Path, name: str, wish: Wish) -> Kept | None:
    """The file, where it was fetched before and is as it was then."""
    for found in os.listdir(folder):  # a few; to match a pattern would take longer than the rest
        start, _, expected = found.partition(".")
        if start != name or expected == "part":
            continue
        path = folder / found
        if sha256_file(path) == expected:
            cut = wish.size < wish.origin.size
            return Kept(path, _sha256(path, wish.size) if cut else expected)
        log.warning(f"download: warning: {path} was damaged, {wish.name} is fetched again")
        path.unlink()
    return None


@contextmanager
def _alone(path: Path, stop: threading.Event) -> Iterator[BinaryIO | None]:
    """The partial file, open to go on with, and held against other processes; None where the one
    that held it before has finished it."""
    with open(path, "a+b", buffering=0) as part:
        while True:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(0.1):
                    raise Stopped from None
        same = path.exists() and os.path.samestat(os.fstat(part.fileno()), path.stat())
        yield part if same else None


def _fill(
    wish: Wish,
    part: BinaryIO,
    network: Network,
    count: Callable[[int], None],
    stop: threading.Event,
) -> str:
    """Fetches what is missing of a partial file, and verifies the whole; its SHA-256.

    Raises:
      LockstepError: the server refuses, has other bytes than it says, or was asked too often.
    """
    reader, patience = remote.open_origin(wish.origin, network), Patience(network.attempts)
    damaged = 0
    while True:
        digests = _Digests(wish)
        part.seek(0)
        there = 0
        while there < wish.size and (piece := part.read(min(READ_BYTES, wish.size - there))):
            digests.update(piece)
            there += len(piece)
        count(there)
        part.seek(there)
        while there < wish.size:
            try:
                for piece in reader.read(there, wish.size):
                    if stop.is_set():
                        raise Stopped
                    part.write(piece)
                    digests.update(piece)
                    there += len(piece)
                    patience.progressed()
                    count(there)
            except Broken as error:
                try:
                    patience.failed(error)
                except Broken as last:
                    raise LockstepError(
                        f"{last}, expected {wish.size - there} bytes more after {network.attempts} "
                        "attempts; run again to go on from there"
                    ) from None
        if digests.right():
            return digests.sha256.hexdigest()
        part.truncate(0)
        damaged += 1
        if damaged == DAMAGED:
            raise LockstepError(
                f"{wish.name}: came with {digests.found}, expected {wish.origin.checksum} as the "
                f"server says, {damaged} times; what came is removed"
            )


class _Digests:
    """The hashes of a file as it comes: SHA-256, and what the server gave of the whole."""

    def __init__(self, wish: Wish):
        self.sha256 = hashlib.sha256()
        # a part of a file has no checksum
        whole = wish.size == wish.origin.size
        self.expected = wish.origin.checksum if whole else None
        self.kind = self.expected.partition(":")[0] if self.expected else "sha256"
        match self.kind:
            case "sha256":
                self.other = None
            case "md5":
                self.other = hashlib.md5(usedforsecurity=False)
            case "git-sha1":
                self.other = hashlib.sha1(b"blob %d\0" % wish.size, usedforsecurity=False)
            case "crc32c":
                import google_crc32c

                self.other = google_crc32c.Checksum()

    def update(self, piece: bytes) -> None:
        self.sha256.update(piece)
        if self.other is not None:
            self.other.update(piece)

    @property
    def found(self) -> str:
        digest = self.sha256 if self.other is None else self.other
        return f"{self.kind}:{digest.digest().hex()}"

    def right(self) -> bool:
        """Whether the hash is the server's, where it gave one."""
        return self.expected is None or self.found == self.expected


def _count(bar: Progress, size: int) -> Callable[[int], None]:
    """Moves a bar to where a file is, and never back where bytes are fetched again."""
    furthest = 0

    def count(there: int) -> None:
        nonlocal furthest
        if there > furthest:
            bar.advance(there - furthest)
            furthest = there

    return count


def _sha256(path: Path, size: int) -> str:
    """Of the first `size` bytes of a file."""
    digest, left = hashlib.sha256(), size
    with open(path, "rb") as file:
        while left and (piece := file.read(min(READ_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    if left:
        raise LockstepError(f"{path}: cut short, expected {size} bytes")
    return digest.hexdigest()
