"""A user's TOML file, read within limits of size and depth.

Every Snakemake job imports this, so it imports nothing heavy.
"""

import re
import tomllib
from pathlib import Path

from lockstep.errors import LockstepError, brief

MAX_BYTES = 2**20  # of a run file; those of all of Psyche's examples have less than 2**14
MAX_PARTS = 32  # of a dotted key, since the time to parse one is quadratic in them
# Where a key may begin: on a line, in brackets, after a comma.
TOO_MANY_PARTS = re.compile(
    rb"""(?m)(?:^|[\[{,])[ \t]*(?:[\w"'-]+[ \t]*\.[ \t]*){%d}""" % MAX_PARTS
)


def read_toml(path: Path) -> dict:
    """Parse a TOML file.

    Raises:
      LockstepError: The file is missing, too large, or not TOML; the message has the line number.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
            raise LockstepError(f"{path}: not a regular file, expected a run file")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected a run file") from error
    if len(content) > MAX_BYTES:
        raise LockstepError(f"{path}: over {MAX_BYTES} bytes, expected a run file of at most that")
    if deep := TOO_MANY_PARTS.search(content):
        line = content.count(b"\n", 0, deep.end()) + 1
        raise LockstepError(f"{path}:{line}: a key of over {MAX_PARTS} parts, expected fewer")
    try:
        return tomllib.loads(content.decode())
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
