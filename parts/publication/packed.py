"""Files of a transcript that are published packed, since they are large or repetitive.

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
from typing import BinaryIO

import numpy as np

from lockstep.errors import LockstepError, brief
from lockstep.files import write_bytes, writes, written

GZIP, PLANES = ".gz", ".planes.gz"
ROUNDS = "rounds.jsonl"
WIDTH = 4  # bytes of a float32
PIECE = 2**20  # bytes that are unpacked at once


def name_of(original: str) -> str:
    """Return the name under which a file of a transcript is published."""
    if original == ROUNDS:
        return original + GZIP
    if original.rpartition("/")[2].startswith("own-"):
        return original + PLANES
    return original


def original_of(name: str) -> str:
    """Return the name that a published file of a transcript has there."""
    return name.removesuffix(PLANES).removesuffix(GZIP)


def pack(source: Path, target: Path) -> None:
    """Write a file as it is published; the name of `target` says how."""
    data = source.read_bytes()
    if target.name.endswith(PLANES):
        whole = len(data) // WIDTH * WIDTH
        planes = np.frombuffer(data[:whole], np.uint8).reshape(-1, WIDTH).T
        data = planes.tobytes() + data[whole:]
    write_bytes(target, gzip.compress(data, mtime=0))


def unpack(source: Path, target: Path, size: int) -> None:
    """Write the original of a packed file, which has so many bytes; in pieces, whatever its size.

    Raises:
      LockstepError: It is damaged, or of another size.
    """
    if not source.name.endswith(PLANES):
        with written(target) as file:
            file.writelines(_unpacked(source, size))
        return
    with writes(target), TemporaryFile(dir=target.parent) as planes:
        planes.writelines(_unpacked(source, size))
        with written(target) as file:
            file.writelines(_interleaved(planes, size))


def _unpacked(source: Path, size: int) -> Iterator[bytes]:
    """Yield the content of a gzip file, which has so many bytes."""
    left = size
    try:
        with gzip.open(source) as file:
            while piece := file.read(min(PIECE, left + 1)):  # a byte more: whether there is one
                left -= len(piece)
                if left < 0:
                    raise LockstepError(f"{source}: over {size} bytes unpacked, expected {size}")
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise LockstepError(f"{source}: {brief(str(error))}, expected a gzip file") from error
    if left:
        raise LockstepError(f"{source}: {size - left} bytes unpacked, expected {size}")


def _interleaved(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield what `pack` made planes of."""
    rows = size // WIDTH
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        whole = np.empty((count, WIDTH), np.uint8)
        for plane in range(WIDTH):
            file.seek(plane * rows + start)
            whole[:, plane] = np.frombuffer(file.read(count), np.uint8)
        yield whole.tobytes()
    yield from _pieces(file, rows * WIDTH, size)


def _pieces(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    for at in range(start, end, PIECE):
        yield file.read(min(PIECE, end - at))
