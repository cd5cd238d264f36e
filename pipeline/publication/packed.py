"""Files of a transcript that are published packed, since they are large or of much repetition.

    NAME.gz           gzip
    NAME.planes.gz    every fourth byte from the first on, every fourth from the second, and so on,
                      then gzip: of float32 numbers the bytes with signs and exponents are alike

What is unpacked has to have the size and the SHA-256 of the original, which stage train left.
"""

import gzip
import io
import zlib
from pathlib import Path

import numpy as np

from pipeline.errors import LockstepError, brief
from pipeline.stage.artifacts import write_bytes

GZIP, PLANES = ".gz", ".planes.gz"
ROUNDS = "rounds.jsonl"
WIDTH = 4  # bytes of a float32


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


def unpack(source: Path, target: Path, most: int) -> None:
    """Write the original of a packed file, which has at most so many bytes.

    Raises:
      LockstepError: It is damaged, or larger.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(source.read_bytes())) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise LockstepError(f"{source}: {brief(str(error))}, expected a gzip file") from error
    if len(data) > most:
        raise LockstepError(f"{source}: over {most} bytes unpacked, expected at most these")
    if source.name.endswith(PLANES):
        whole = len(data) // WIDTH * WIDTH
        planes = np.frombuffer(data[:whole], np.uint8).reshape(WIDTH, -1).T
        data = planes.tobytes() + data[whole:]
    write_bytes(target, data)
