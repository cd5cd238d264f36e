"""Checksums as servers give them: `sha256:`, `git-sha1:`, `md5:` or `crc32c:` and hexadecimal."""

import hashlib
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

READ_BYTES = 2**20
SIZES = {"md5": 16, "crc32c": 4}  # bytes of those of Google's storage, the surest first


def hasher(kind: str, size: int) -> Any:
    """Return a new hash object with `update` and `digest`.

    `size` is that of the whole file in bytes, with which git's hash begins.
    """
    match kind:
        case "git-sha1":
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case "crc32c":
            import google_crc32c

            return google_crc32c.Checksum()
        case _:
            return hashlib.new(kind, usedforsecurity=False)


def of_file(path: Path, kind: str, size: int | None = None) -> str:
    """Return the hash of a file, or of its first `size` bytes, in hexadecimal.

    Raises:
      LockstepError: the file is shorter than `size`.
    """
    left = path.stat().st_size if size is None else size
    digest = hasher(kind, left)
    with open(path, "rb") as file:
        while left and (piece := file.read(min(READ_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    if left:
        raise LockstepError(f"{path}: cut short, expected {size} bytes")
    return digest.digest().hex()
