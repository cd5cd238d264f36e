"""Untrusted files and folders: walked, checked and read, a user's own or a stranger's.

A stranger's are a model, a publication or a bundle. Names are safe to print and to join to a
folder, files are regular (from a pipe reading would never begin, from a device never end), and what
is read into memory has a size that is looked at first, as it is and as it unpacks.
What a server may cost, net/limits.py says; docs/reference/what-is-refused.md lists who checks what.

A link in a stranger's folder may lead to a private file of this machine, which would be trained on,
exported and pushed. So a link may lead into the folder itself or, from a snapshot in the cache of
the hub's client, to that repository's blobs, and nowhere else. And somebody may write to a file
while it is read; then its hash would be that of other bytes.
"""

import os
import struct
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import check_regular_file
from pipeline.net.errors import DEEPEST, check_name

# At most, of what packed data unpack to: bytes, or times their size. Text comes to 3 to 10 times.
LEAST_UNPACKED, TIMES_UNPACKED = 2**22, 200
YAML_DEPTH, YAML_NODES, YAML_LENGTH, YAML_DIGITS = 100, 100_000, 2**20, 400
YAML_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
# With what NumPy and zipfile raise at files that are not theirs.
A_FILE_OF_ARRAYS = (
    "a file of arrays",
    ArithmeticError,
    EOFError,
    MemoryError,
    OSError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
)


class FileStamp(NamedTuple):
    """Size of a file in bytes, and time of its last change in nanoseconds."""

    size: int
    nanoseconds: int


def stamp(path: Path) -> FileStamp:
    """Return size and time of a file."""
    return stamp_of(_status(path))


def _status(path: Path) -> os.stat_result:
    with expecting(path, "a readable file"):
        return os.stat(path)


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return a file's stamp, size and time, from what the system reports about it."""
    return FileStamp(status.st_size, status.st_mtime_ns)


@contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """Yield a path that leads to this folder, whatever is renamed or put in its place meanwhile."""
    with expecting(folder, "a readable folder"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")  # workers read there too
    finally:
        os.close(handle)


@contextmanager
def unchanged(paths: Iterable[Path]) -> Iterator[None]:
    """Check at the end of the block that nobody has changed the files since its beginning."""
    before = {path: _identity(path) for path in paths}
    yield
    for path, expected in before.items():
        if _identity(path) != expected:
            raise _changed(path)


def _identity(path: Path) -> tuple[int, ...]:
    """Return what the system reports about a file; it changes if anybody writes or replaces it.

    Anybody can set the time of a file's last change, but not that of its inode's last change. A new
    hard link changes the latter too.
    """
    status = _status(path)
    return (status.st_dev, status.st_ino, *stamp_of(status), status.st_ctime_ns)


def _changed(path: Path) -> LockstepError:
    return LockstepError(f"{path}: changed while it was read, expected it to stay as it is")


def check_unchanged(path: Path, expected: FileStamp) -> None:
    """Check that nobody has changed a file."""
    if stamp(path) != expected:
        raise _changed(path)


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path in a folder leads to a file in it, through whatever links."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    places = [root]
    for snapshot in (root, *root.parents):  # models--owner--name/snapshots/COMMIT
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and "--" in repository.name:
            places.append(repository / "blobs")
    return any(real.is_relative_to(place) for place in places)


def check_inside(path: Path, folder: Path) -> None:
    """Check that no link makes a path in a folder lead to a file elsewhere."""
    if not is_inside(path, folder):
        raise LockstepError(
            f"{path}: a link to {os.path.realpath(path)}, expected none that leads out of {folder}"
        )


def check_file(path: Path, folder: Path, *, most: int | None = None) -> None:
    """Check that a path is a regular file, and that no link leads to it out of `folder`."""
    check_inside(path, folder)
    check_regular_file(path, most=most)


def check_unpacked(packed: int, unpacked: int, name: str, least: int = 0) -> int:
    """Check that `packed` bytes may unpack to `unpacked`; return the most that they may.

    `least` is what any number of bytes may unpack to, LEAST_UNPACKED by default.
    """
    allowed = max(least or LEAST_UNPACKED, TIMES_UNPACKED * packed)
    if unpacked > allowed:
        raise LockstepError(
            f"{name}: {packed} bytes unpack to {unpacked} and more, expected at most "
            f"{TIMES_UNPACKED} times as many"
        )
    return allowed


def load_yaml(content: bytes | str, name: str, kind: str = "SafeLoader") -> Any:
    """Return the value of YAML, in libyaml's time: Python's takes a minute for 10 MB of blanks."""
    check_yaml(content, name)
    return yaml.load(content, getattr(yaml, f"C{kind}", getattr(yaml, kind)))


def check_yaml(content: bytes | str, name: str) -> None:
    """Check a stranger's YAML before it is parsed: parsers are recursive, and aliases multiply."""
    if len(content) > YAML_LENGTH:
        raise LockstepError(f"{name}: {len(content)} long, expected YAML of at most {YAML_LENGTH}")
    opened: list[tuple[str | None, int]] = []  # the anchors, and nodes so far, of what is not done
    sizes: dict[str, int] = {}
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        for event in yaml.parse(content, loader):
            match event:
                case yaml.CollectionStartEvent():
                    opened.append((event.anchor, 1))
                    if len(opened) > YAML_DEPTH:
                        raise LockstepError(
                            f"{name}: lists or tables more than {YAML_DEPTH} deep, expected fewer"
                        )
                    continue
                case yaml.CollectionEndEvent():
                    anchor, nodes = opened.pop()
                case yaml.AliasEvent():
                    anchor, nodes = None, sizes.get(event.anchor, YAML_NODES)  # or in itself
                case yaml.ScalarEvent():
                    _check_digits(event, name)
                    anchor, nodes = event.anchor, 1
                case _:
                    continue
            if anchor is not None:
                sizes[anchor] = nodes
            if opened:
                outer, count = opened.pop()
                opened.append((outer, count + nodes))
                if count + nodes > YAML_NODES:
                    raise LockstepError(
                        f"{name}: more than {YAML_NODES} values, those of aliases counted each "
                        "time, expected fewer"
                    )
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LockstepError(f"{name}: {brief(str(error), 200)}, expected YAML") from error


def _check_digits(scalar: yaml.ScalarEvent, name: str) -> None:
    """Check that YAML makes no long number of a value: 1:1:1 is 3661, and "1:1:1" a string."""
    if (tag := scalar.tag or "!") == "!" and len(scalar.value) > YAML_DIGITS:
        tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, scalar.value, scalar.implicit)
    if tag in YAML_NUMBERS and len(scalar.value) > YAML_DIGITS:
        raise LockstepError(f"{name}: a number of over {YAML_DIGITS} digits, expected fewer")


def walk(folder: Path, *, hidden: bool = True) -> Iterator[tuple[str, Path]]:
    """Walk an untrusted folder: yield everything below it but folders, by name; no links.

    `hidden` says whether names that begin with a dot are included.
    """
    below = [("", folder, 1)]
    while below:
        prefix, path, depth = below.pop()
        with expecting(path, "a readable folder"), os.scandir(path) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith(".") and not hidden:
                continue
            name = prefix + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name, path / entry.name
            elif depth == DEEPEST:
                raise LockstepError(f"{folder}: {DEEPEST} folders in one another, expected fewer")
            else:
                below.append((f"{name}/", path / entry.name, depth + 1))


def check_regular(folder: Path) -> None:
    """Check that a folder holds only regular files and folders, and no link out of it."""
    for name, path in walk(folder):
        check_name(name, str(folder))
        check_inside(path, folder)
        if not path.is_dir():  # a link to one inside
            check_regular_file(path)


def expand(path: str, key: str) -> Path:
    """Return a user's path in the run file with the home folder in the place of ~."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = path.partition("/")[0]
        raise LockstepError(
            f"{key}: found {path}, expected a path; {user} is no user's home here"
        ) from None
