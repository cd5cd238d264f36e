"""The transcript of a publication: which of its files are published, and how they are packed.

    NAME.gz           gzip
    NAME.planes.gz    every fourth byte from the first on, every fourth from the second, and so on,
                      then gzip: of float32 numbers the bytes with signs and exponents are alike

What is unpacked has to have the size and the SHA-256 of the original, which stage train left.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

import numpy as np

from lockstep.errors import LockstepError, expecting
from lockstep.files import sha256_file, write_bytes, writes, written
from lockstep.transcript.transcript import Transcript
from parts.publication import layout
from parts.publication.layout import DrawnWindow, Publication
from pipeline import runfile
from pipeline.audit.bundle import files_of
from pipeline.recheck.convert import is_given
from pipeline.recheck.outputs import TRANSCRIPT, PublishedFile
from pipeline.recheck.published import peers_by_window
from pipeline.stage.untrusted_files import check_unpacked

WIDTH = 4  # bytes of a float32
PIECE = 2**20  # bytes that are unpacked at once


def files(
    transcript: Transcript, published: list[DrawnWindow], run: runfile.Run, *, kept: bool
) -> set[str]:
    """Return the transcript's files that a publication has: no other is ever looked at.

    These are all rounds and the hashes of all snapshots. Where messages are kept, also all messages
    and what the peers of the published windows owned: the params follow from the run's start, which
    is included if nobody else has it. Where they are not kept, also whole snapshots, without the
    last params if the published weights are the same.
    """
    names = {layout.ROUNDS_FILE, "header.json"}
    names |= {f"snapshots/{step:05}/state.json" for step in transcript.snapshots}
    if not kept:
        for window, peers in peers_by_window(published):
            names |= files_of(transcript, list(transcript.window(window)), window, peers)
        if run.export.dtype == "float32":
            names.remove(f"snapshots/{transcript.snapshots[-1]:05}/params.safetensors")
        return names
    for entry in transcript.rounds:
        sent = (*entry.evidence.messages.values(), *entry.evidence.others.values())
        names |= {f"payloads/{message.payload}" for message in sent}
    start = f"snapshots/{transcript.snapshots[0]:05}"
    if is_given(run):
        names |= {f"{start}/{part}.safetensors" for part in ("params", "shared")}
    return names | {
        f"snapshots/{window.opening:05}/own-{peers[0]:03}.safetensors"
        for window, peers in published
    }


class Unpacked(NamedTuple):
    """A published transcript's folder, and the files in it by the names that they have there."""

    folder: Path
    files: dict[str, PublishedFile]


def unpack(
    folder: Path, aside: Path, publication: Publication, skip: set[str], most: int
) -> Unpacked:
    """Put the transcript of a publication `aside`, but for the files to `skip`.

    Its files may have at most `most` bytes together, unpacked. The size of a packed one is known in
    advance, from what stage train left.
    """
    place, unpacked = aside / "unpacked" / TRANSCRIPT, {}
    originals = layout.read_made(folder, "train").files
    for name, file in publication.files.items():
        if not name.startswith(f"{TRANSCRIPT}/") or name in skip:
            continue
        original = layout.original_name(name.removeprefix(f"{TRANSCRIPT}/"))
        target = place / original
        with writes(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        is_packed = layout.packed_name(original) != original
        if is_packed and f"transcript/{original}" not in originals:
            raise LockstepError(f"{name}: expected a file that {layout.made('train')} lists")
        size = originals[f"transcript/{original}"].bytes if is_packed else file.bytes
        if name == layout.ROUNDS:  # its rounds are all in memory
            check_unpacked(file.bytes, size, name)
        if size > most:
            raise LockstepError(
                f"{name}: {size} bytes, expected at most {most}, the room that other files leave"
            )
        most -= size
        if is_packed:
            unpack_file(folder / name, target, size)
            file = PublishedFile(bytes=size, sha256=sha256_file(target))
        else:
            target.symlink_to((folder / name).absolute())  # a hard link would change the file
        unpacked[original] = file
    return Unpacked(place, unpacked)


# ---- One file ----


def pack(source: Path, target: Path) -> None:
    """Write a transcript's file as it is published; the name of `target` says how."""
    data = source.read_bytes()
    if target.name.endswith(layout.PLANES):
        aligned = len(data) // WIDTH * WIDTH
        planes = np.frombuffer(data[:aligned], np.uint8).reshape(-1, WIDTH).T
        data = planes.tobytes() + data[aligned:]
    write_bytes(target, gzip.compress(data, mtime=0))


def unpack_file(source: Path, target: Path, size: int) -> None:
    """Write the original of a transcript's packed file, which has `size` bytes, in pieces."""
    if not source.name.endswith(layout.PLANES):
        with written(target) as file:
            file.writelines(_unpacked(source, size))
        return
    with writes(target), TemporaryFile(dir=target.parent) as planes:
        planes.writelines(_unpacked(source, size))
        with written(target) as file:
            file.writelines(_interleaved(planes, size))


def _unpacked(source: Path, size: int) -> Iterator[bytes]:
    """Yield the content of a transcript's gzip file, which has `size` bytes."""
    left = size
    with expecting(source, "a gzip file", OSError, EOFError, zlib.error), gzip.open(source) as file:
        while piece := file.read(min(PIECE, left + 1)):  # a byte more: whether there is one
            left -= len(piece)
            if left < 0:
                raise LockstepError(f"{source}: over {size} bytes unpacked, expected {size}")
            yield piece
    if left:
        raise LockstepError(f"{source}: {size - left} bytes unpacked, expected {size}")


def _interleaved(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the bytes of a transcript's file that `pack` split into planes."""
    rows = size // WIDTH
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        block = np.empty((count, WIDTH), np.uint8)
        for plane in range(WIDTH):
            file.seek(plane * rows + start)
            block[:, plane] = np.frombuffer(file.read(count), np.uint8)
        yield block.tobytes()
    file.seek(rows * WIDTH)
    yield file.read(size - rows * WIDTH)  # fewer bytes than a float32
