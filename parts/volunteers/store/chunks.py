"""A large file in a store: chunks of 8 MiB, each checked as it is read, and an index of them.

The index has the size and each chunk's SHA-256; the SHA-256 of the index is the file's name, which
a link or a record holds. So whoever knows that reads nothing else, and a reader that was cut off
goes on where it was. The index is put last: where it is, all chunks are.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lockstep.errors import LockstepError, expecting
from lockstep.files import writes
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.validation import validate_json
from parts.volunteers.signed import MOST_BYTES, canonical
from parts.volunteers.store.verbs import Store

CHUNK_BYTES = 2**23
AT_ONCE = 4
INDEX = "index"


class LackingError(LockstepError):
    """A chunk of a file in the store is not there."""


class ChunkIndex(Table):
    """The index of a large file in a store: which chunks it has."""

    bytes: Annotated[int, Field(ge=0)]
    """Size of the file."""
    chunks: Annotated[tuple[Hash, ...], AsTuple]
    """SHA-256 of each."""


def index_of(path: Path) -> ChunkIndex:
    """Return the index of a file's chunks."""
    with expecting(path, "a readable file"):
        hashes = tuple(hashlib.sha256(chunk).hexdigest() for chunk in _chunks(path))
        return ChunkIndex(bytes=path.stat().st_size, chunks=hashes)


def name_of(index: ChunkIndex) -> str:
    """Return the SHA-256 of an index of chunks, by which the file is known."""
    return hashlib.sha256(_content(index)).hexdigest()


def lengths(folder: str, size: int) -> dict[str, int]:
    """Return how long each chunk of a file of `size` bytes is, by its object's name."""
    starts = range(0, size, CHUNK_BYTES)
    index = ChunkIndex(bytes=size, chunks=("0" * 64,) * len(starts))
    parts = {_name(folder, n): min(CHUNK_BYTES, size - start) for n, start in enumerate(starts)}
    return parts | {f"{folder}{INDEX}": len(_content(index))}


def put(store: Store, folder: str, path: Path) -> None:
    """Put a file in chunks below `folder`, which ends in the index's SHA-256 and "/".

    Raises:
      LockstepError: other bytes stand there.
    """
    index = _content(index_of(path))
    parts = ((_name(folder, number), chunk) for number, chunk in enumerate(_chunks(path)))
    for name, content in (*parts, (f"{folder}{INDEX}", index)):
        if not store.create(name, content):
            raise LockstepError(
                f"{store.address}/{name}: has other bytes, expected those of {path.name}"
            )


def fetch(store: Store, folder: str, sha256: str, path: Path, most: int | None = None) -> None:
    """Fetch a file's chunks; those that an earlier try brought are not read again.

    Args:
      store: Where it is.
      folder: The prefix of its chunks.
      sha256: Of its index.
      path: Destination; `.NAME.part` beside it has what is read so far.
      most: Bytes that it may have, where a stranger put it.

    Raises:
      LockstepError: a chunk or the index is not there, or not what it should be.
    """
    index = _read_index(store, folder, sha256)
    if most is not None and index.bytes > most:
        raise LockstepError(f"{folder}{INDEX}: {index.bytes} bytes, expected at most {most}")
    aside = path.with_name(f".{path.name}.part")
    with writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
            file.truncate(index.bytes)

            def bring(number: int) -> None:
                start = number * CHUNK_BYTES
                size = min(CHUNK_BYTES, index.bytes - start)
                existing = os.pread(file.fileno(), size, start)
                if hashlib.sha256(existing).hexdigest() != index.chunks[number]:
                    chunk = _read(store, _name(folder, number), index.chunks[number], size)
                    os.pwrite(file.fileno(), chunk, start)

            with ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(bring, range(len(index.chunks))):
                    pass
            os.fsync(file.fileno())
        os.replace(aside, path)


def _read_index(store: Store, folder: str, sha256: str) -> ChunkIndex:
    content = _read(store, f"{folder}{INDEX}", sha256, MOST_BYTES)
    index = validate_json(ChunkIndex, content, f"{folder}{INDEX}")
    if -(-index.bytes // CHUNK_BYTES) != len(index.chunks):
        raise LockstepError(
            f"{folder}{INDEX}: {index.bytes} bytes in {len(index.chunks)} chunks, expected chunks "
            f"of {CHUNK_BYTES}"
        )
    return index


def _read(store: Store, name: str, sha256: str, most: int) -> bytes:
    """Return a chunk or an index with this SHA-256."""
    stored = store.look(name, most)
    if stored is None:
        raise LackingError(f"{store.address}/{name}: found nothing, expected a part of a file")
    if stored.content is None:
        raise LockstepError(f"{store.address}/{name}: over {most} bytes, expected at most that")
    if sha256 != (found := stored.sha256):
        raise LockstepError(f"{store.address}/{name}: SHA-256 {found[:12]}, expected {sha256[:12]}")
    return stored.content


def _content(index: ChunkIndex) -> bytes:
    return canonical(index.model_dump(mode="json"))


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _name(folder: str, number: int) -> str:
    return f"{folder}{number:04}"
