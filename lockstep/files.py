"""Files that are complete or absent, their hashes, and JSON that everybody reads alike.

JSON: a key stands once in a table, and a number is finite. Python takes the last of two equal keys,
other readers the first, so a stranger's file could say two things at once; it reads NaN and
infinity, which JSON does not have, and integers that no float can hold.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import LockstepError, brief, expecting

JSON_BYTES = 2**28  # the most of a file that is read as one table

# ---- Writing ----


def writes(path: Path) -> AbstractContextManager[None]:
    """Name `path` in the error if the system refuses to write it in the block: a full disk."""
    return expecting(path, "to write there")


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that is flushed to disk and renamed to `path` at the end of the block.

    So `path` is complete or absent after a kill, and absent after an error. What a kill leaves is
    `.NAME.part`, which the next writer of `path` takes over; a concurrent writer waits.
    """
    part = path.with_name(f".{path.name}.part")
    with writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_alone(part) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise


def _open_alone(path: Path) -> BinaryIO:
    """Open an empty file that no other writer has open; its lock ends when it is closed."""
    while True:
        file = open(path, "ab")  # noqa: SIM115 - for the caller to close
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                return file
        file.close()  # renamed while this one waited


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes to a file that is complete or absent after a kill."""
    with written(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write indented JSON to a file, as `write_bytes` does; NaN, which JSON lacks, is refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def named_place(path: Path) -> Path:
    """Return where a file is written whose path a person named: where a link leads, which stays.

    Raises:
      LockstepError: There is a folder, a device or a pipe, none of which may become a file.
    """
    place = Path(os.path.realpath(path))
    if os.path.lexists(place):
        check_regular_file(path)
    return place


def write_named(path: Path, text: str) -> None:
    """Write UTF-8 text to a path that a person named; a file that was there keeps its mode."""
    place = named_place(path)
    with written(place) as file:
        if place.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
        file.write(text.encode())


def link(source: Path | str, target: Path | str) -> None:
    """Make a hard link to a file that nobody changes, or a copy if the system cannot link."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


# ---- Reading ----


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_regular_file(path: Path, *, most: int | None = None) -> None:
    """Check that a path is a regular file, of at most `most` bytes.

    A read of a pipe may never end, and one of a device may never stop giving bytes.
    """
    with expecting(path, "a readable file"):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise LockstepError(f"{path}: not a regular file, expected one")
    if most is not None and status.st_size > most:
        raise LockstepError(f"{path}: {status.st_size} bytes, expected at most {most}")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
      LockstepError: it is not a regular file, or larger.
      OSError: it does not exist, or may not be read.
    """
    # does not wait for a pipe's other end
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise LockstepError(f"{path}: not a regular file, expected one")
        content = file.read(most + 1) if status.st_size <= most else b""
    if max(status.st_size, len(content)) > most:
        raise LockstepError(f"{path}: over {most} bytes, expected at most that")
    return content


def read_json(path: Path) -> dict:
    """Return the JSON object in a file.

    Raises:
      LockstepError: The file is missing, no regular file or too large; or it does not hold a JSON
        object, whose numbers are finite and whose keys stand once.
    """
    with expecting(path, "JSON", OSError, ValueError, RecursionError):  # lists thousands deep
        content = loads(read_bytes(path, JSON_BYTES).decode())
    if not isinstance(content, dict):
        raise LockstepError(f"{path}: found {type(content).__name__}, expected a table")
    return content


def loads(text: str | bytes) -> Any:
    """Return the value of a file's JSON text, which everybody reads alike.

    Raises:
      ValueError: It is no JSON, a key appears twice in a table, or a number is not finite.
      RecursionError: Its lists are thousands deep in one another.
    """
    return json.loads(
        text,
        parse_constant=_finite,
        parse_float=_finite,
        parse_int=_integer,
        object_pairs_hook=once,
    )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of a file's JSON whose keys stand once; an `object_pairs_hook`."""
    table = dict(pairs)
    if len(table) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {brief(repr(name))} appears twice in a table")
    return table


def _finite(number: str) -> float:
    """Return a number of a file's JSON, without NaN and infinity, which Python reads and writes."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{brief(number, 20)} is not a finite number")
    return value


def _integer(number: str) -> int:
    """Return an integer of a file's JSON, if a float can hold it."""
    _finite(number)
    return int(number)
