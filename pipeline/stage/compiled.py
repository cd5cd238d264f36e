"""Compiled programs, kept so that a second run starts at once.

JAX names a program for what it was compiled from, and runs whatever a file of that name holds. A
sync that mixes up names, or a flipped bit that its compression does not notice, would change
results without a word, and a witness would load the same file. So each file begins with the SHA-256
of its program's name and content. This finds accidents: whoever can write here can write that too.

Peers in processes of their own need the same programs at the same time. The first one compiles a
program, the others wait for its file.
"""

import fcntl
import hashlib
import logging
import os
import threading
import time
from pathlib import Path

from lockstep.files import writes

log = logging.getLogger(__name__)
PROGRAM_SUFFIX = ".program"  # JAX's own files have another, and stay where a folder has both
DIGEST_BYTES = 32  # bytes
PATIENCE = 60.0  # seconds that one waits for another's program, before it compiles its own
POLL_SECONDS = 0.02  # seconds between two looks


class CheckedCache:
    """A cache of compiled programs, as JAX asks for one, in a folder that it makes.

    A thread that misses a program locks the program's temporary file until it stores the program
    or asks for the next one. The kernel releases a killed holder's lock; a holder that hangs costs
    the others `PATIENCE`.

    `waits` says whether to wait for what another process compiles. The processes of one JAX program
    must not: only the first of them stores, and it computes once all have compiled.
    """

    def __init__(self, path: str | os.PathLike, waits: bool = True):
        self._path = Path(path)  # by this name JAX logs it
        self._path.mkdir(parents=True, exist_ok=True)
        self._waits, self._warned = waits, False
        self._held = threading.local()  # `key` that this thread compiles, and its open `file`

    def get(self, key: str) -> bytes | None:
        """Return the compiled program stored under this name; None if there is none or another."""
        self._release()  # JAX does not store every program that it compiles
        until = time.monotonic() + PATIENCE
        program = self._read(key)
        while program is None and self._waits:
            reserved = self._reserve(key)
            program = self._read(key)  # it may have been stored before the lock was taken
            if reserved or time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        if program is not None:
            self._release()
        return program

    def put(self, key: str, value: bytes) -> None:
        """Store a compiled program, whole or not at all, unless another process is storing it."""
        if getattr(self._held, "key", None) != key and not self._reserve(key):
            return
        file = self._held.file
        with writes(self._of(key)):
            try:
                # No fsync: a file that a power cut leaves half written fails its digest.
                file.write(_digest(key, value) + value)
                file.flush()
                os.replace(file.name, self._of(key))
            finally:
                self._release()

    def _read(self, key: str) -> bytes | None:
        path = self._of(key)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        if stored[:DIGEST_BYTES] == _digest(key, stored[DIGEST_BYTES:]):
            return stored[DIGEST_BYTES:]
        if not self._warned:  # once for all of a folder
            log.warning(
                f"{path}: the program differs from the one stored there; it is compiled again"
            )
            self._warned = True
        return None

    def _reserve(self, key: str) -> bool:
        """Take the lock to compile and store a program, and return whether it could be taken."""
        file = open(self._path / f".{key}.part", "ab")  # noqa: SIM115 - until it is released
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                file.truncate(0)  # of a killed holder
                self._held.key, self._held.file = key, file
                return True
        except (BlockingIOError, FileNotFoundError):  # locked, or stored and renamed meanwhile
            pass
        file.close()
        return False

    def _release(self) -> None:
        """Give up this thread's lock of a compiled program, if any; remove an unused file."""
        file = getattr(self._held, "file", None)
        if file is None:
            return
        self._held.key = self._held.file = None
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                os.unlink(file.name)
        except FileNotFoundError:  # renamed to the program's name
            pass
        finally:
            file.close()

    def _of(self, key: str) -> Path:
        return self._path / f"{key}{PROGRAM_SUFFIX}"


def check_programs() -> bool:
    """Make JAX keep its programs in a CheckedCache; return whether it can: no API is public.

    A program has the same name on each CPU device, so that it is compiled once. JAX does this for
    GPUs alone; XLA loads the program for the device that is asked for.
    """
    try:
        from jax._src import cache_key, compilation_cache

        if compilation_cache.get_file_cache is not _cache_of:
            hash_options = cache_key._hash_serialized_compile_options
            compilation_cache.reset_cache()  # forgets where earlier programs were cached
            compilation_cache.get_file_cache = _cache_of
            cache_key._hash_serialized_compile_options = lambda hashed, options, **_: hash_options(
                hashed, options, strip_device_assignment=True
            )
    except (ImportError, AttributeError):
        return False
    return True


def _cache_of(path: str) -> tuple[CheckedCache, str]:
    import jax

    return CheckedCache(path, waits=jax.process_count() == 1), path


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + value).digest()
