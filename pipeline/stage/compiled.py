"""Compiled programs, kept so that a second run starts at once.

JAX names a program for what it was compiled from, and runs whatever a file of that name holds. A
sync that mixes up names, or a flipped bit that its compression does not notice, would change
results without a word, and a witness would load the same file. So each file begins with the SHA-256
of its program's name and content. This finds accidents: whoever can write here can write that too.
"""

import hashlib
import logging
import os
from pathlib import Path

from pipeline.stage.artifacts import write_bytes

log = logging.getLogger(__name__)
SUFFIX = ".program"  # JAX's own files have another, and stay where a folder has both
DIGEST = 32  # bytes


class CheckedCache:
    """A cache of compiled programs, as JAX asks for one, in a folder that it makes."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)  # by this name JAX logs it
        self._path.mkdir(parents=True, exist_ok=True)
        self._said = False

    def get(self, key: str) -> bytes | None:
        """Return the program stored under this name; None if there is none or another."""
        path = self._of(key)
        try:
            kept = path.read_bytes()
        except FileNotFoundError:
            return None
        if kept[:DIGEST] == _digest(key, kept[DIGEST:]):
            return kept[DIGEST:]
        if not self._said:  # once for all of a folder
            log.warning(f"{path}: found another program than was kept there; it is compiled again")
            self._said = True
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program; its file is whole or absent."""
        write_bytes(self._of(key), _digest(key, value) + value)

    def _of(self, key: str) -> Path:
        return self._path / f"{key}{SUFFIX}"


def check_programs() -> bool:
    """Have JAX keep its programs in a CheckedCache, whatever folder it is told.

    Returns:
      Whether this JAX can: it has no public way.
    """
    try:
        from jax._src import compilation_cache

        if compilation_cache.get_file_cache is not _cache_of:
            compilation_cache.reset_cache()  # forgets where earlier programs were cached
            compilation_cache.get_file_cache = _cache_of
    except (ImportError, AttributeError):
        return False
    return True


def _cache_of(path: str) -> tuple[CheckedCache, str]:
    return CheckedCache(path), path


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + value).digest()
