"""A user's TOML file, read within limits; a run file that says only how it differs from its base.

    base = "default.toml"        # beside it, at its top
    [peers]
    count = 8

Its tables are merged into the base's. A table that says which kind something is, such as
`[model.LLM.optimizer.AdamW]`, takes the place of the base's.

Every Snakemake job imports this, so it imports nothing heavy.
"""

import re
import tomllib
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, RequestError, brief, expecting

MAX_BYTES = 2**20  # of a run file; those of all of Psyche's examples have less than 2**14
MAX_PARTS = 32  # of a dotted key, since the time to parse one is quadratic in them
# Where a key may begin: on a line, in brackets, after a comma.
TOO_MANY_PARTS = re.compile(
    rb"""(?m)(?:^|[\[{,])[ \t]*(?:[\w"'-]+[ \t]*\.[ \t]*){%d}""" % MAX_PARTS
)
BASE = "base"
KINDS = (  # enums of the run file: one kind, or another, never a mixture of two
    "model.LLM.checkpoint",
    "model.LLM.data_location",
    "model.LLM.lr_schedule",
    "model.LLM.optimizer",
)


def read_toml(path: Path) -> dict:
    """Parse a TOML file."""
    with expecting(path, "a run file"):
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
            raise LockstepError(f"{path}: not a regular file, expected a run file")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise LockstepError(f"{path}: over {MAX_BYTES} bytes, expected a run file of at most that")
    if deep := TOO_MANY_PARTS.search(content):
        line = content.count(b"\n", 0, deep.end()) + 1
        raise LockstepError(f"{path}:{line}: a key of over {MAX_PARTS} parts, expected fewer")
    try:
        document = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise LockstepError(f"{path}:{line}: byte 0x{byte:02x}, expected UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        position = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(position[1]) if position else content.count(b"\n") + 1
        reason = brief(str(error).split(" (at ")[0])
        raise LockstepError(f"{path}:{line}: {reason}, expected TOML") from error
    except (ValueError, RecursionError) as error:  # numbers of 4300 digits, lists 300 deep
        raise LockstepError(f"{path}: {error}, expected TOML") from error
    check_values(path, document)
    return document


def check_values(where: object, document: dict) -> None:
    """Check that a TOML run file can hold each value of a document, which errors call `where`.

    Integers have 64 bits, with a sign or without: Python's may have thousands. JSON has nulls too.
    """
    todo: list[tuple[str, Any]] = list(document.items())
    while todo:
        key, value = todo.pop()
        if value is None:
            raise RequestError(f"{where}: {brief(key)} is null, expected what a run file can hold")
        if isinstance(value, dict):
            todo += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{key}[{place}]", inner) for place, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(f"{where}: {key} is {brief(hex(value))}, expected at most 64 bits")


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the tables of a run file, including those of its bases.

    Raises:
      LockstepError: It or a base is missing or is not TOML, or a base has itself as its base.
    """
    document: dict[str, Any] = {}
    for file in reversed(chain(path)):
        document = merged(document, read_toml(file))
    document.pop(BASE, None)
    return document


def written_whole(path: Path) -> str:
    """Return a run file with the tables of its bases in it, as text; without a base, as it is.

    The stages, DVC and Snakemake read params/run.toml, in which every table stands.
    """
    files = chain(path)  # which checks that it is UTF-8
    text = path.read_text(encoding="utf-8")
    if len(files) == 1:
        return text
    import tomlkit

    head = "".join(takewhile(lambda line: line[0] == "#", text.splitlines(keepends=True)))
    made = f"Written whole from {path.name}, which has what differs from its base."
    return f"{head}#\n# {made}\n\n{tomlkit.dumps(read_run_file(path))}"


def chain(path: Path) -> list[Path]:
    """Return a run file, its base, the base of that, and so on."""
    files = [path]
    while (name := read_toml(files[-1]).get(BASE)) is not None:
        is_name = isinstance(name, str) and Path(name).name == name
        base = files[-1].parent / name if is_name else path
        if not is_name or not base.is_file():
            raise LockstepError(
                f"{files[-1]}: base is {name!r}, expected the name of a run file beside it"
            )
        if base in files:
            raise LockstepError(
                f"{files[-1]}: base is {name!r}, expected a file that is not based on this one"
            )
        files.append(base)
    return files


def value_at(tables: Any, key: str) -> Any:
    """Return the value at a dotted key of TOML tables."""
    return reduce(lambda table, part: table[part], key.split("."), tables)


def merged(base: dict[str, Any], changes: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return TOML tables with changes, of which a kind replaces another; `where` is theirs."""
    tables = dict(base)
    for key, value in changes.items():
        path = f"{where}{key}"
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        tables[key] = merged(base[key], value, f"{path}.") if both and path not in KINDS else value
    return tables
