"""The files of a user's corpus: one file, or all in a folder.

A file whose name ends in .jsonl or .jsonl.gz is JSON lines; any other is text.
"""

import codecs
from collections import defaultdict
from pathlib import Path

from lockstep.errors import LockstepError
from pipeline.sources.text.documents import Source, unreadable
from pipeline.sources.text.json_lines import ENDINGS, JsonLines
from pipeline.sources.text.text_file import TextFile
from pipeline.stage.given_files import is_inside, stamp, walk
from pipeline.tokens import signs

HEAD_BYTES = 8000  # a NUL in the first bytes marks a binary file, as in git
PATH = "model.LLM.data_location.Corpus.path"

# Why a file is left out.
EMPTY, BINARY, LINKS = "empty files", "binary files", "links out of the folder"
ENCODED = "files of UTF-16 or UTF-32, expected UTF-8"


def find(path: Path, key: str) -> tuple[list[Source], tuple[str, ...]]:
    """Return the files that have text, by name, and a warning for each kind that was left out.

    All files below a folder, except hidden ones and those in hidden folders. Left out with a
    warning: empty files, files with a NUL at their beginning, and links to folders or out of the
    folder. `key` is that of the text in a JSON line.

    Raises:
      LockstepError: the path does not exist, cannot be read, or holds no text.
    """
    if path.is_dir():
        named = dict(sorted(walk(path, hidden=False)))
    elif path.is_file():
        named = {path.name: path}
    else:
        raise LockstepError(
            f"{PATH}: found no {path.absolute()}, expected a text file, a .jsonl file or a folder "
            "of such files"
        )
    sources, left_out = [], defaultdict(list)
    for name, file in named.items():
        if not name.isprintable():
            raise LockstepError(f"{path}: found a file named {name!r}, expected printable names")
        why = _left_out(path, file)
        if why is None:
            sources.append(_source(name, file, key))
        else:
            left_out[why].append(name)
    warnings = tuple(
        f"{path}: left out {len(names)} {why}: {names[0]}{' and others' if names[1:] else ''}"
        for why, names in left_out.items()
    )
    if not sources:
        hint = f" ({'; '.join(warnings)})" if warnings else ""
        raise LockstepError(f"{PATH}: found no text in {path.absolute()}{hint}")
    return sources, warnings


def _left_out(root: Path, file: Path) -> str | None:
    """Return why a file is not read, or None."""
    if file.is_symlink() and root.is_dir() and not (file.is_file() and is_inside(file, root)):
        return LINKS
    if not file.is_file():  # a socket or a pipe
        return BINARY
    if not stamp(file).size:
        return EMPTY
    if root.is_dir() and not _is_json_lines(file):
        head = _head(file)
        if signs.encoding_of(head):
            return ENCODED
        if b"\0" in head or signs.format_of(head[: signs.HEAD_BYTES]):
            return BINARY
    return None


def _source(name: str, file: Path, key: str) -> Source:
    current = stamp(file)
    if _is_json_lines(file):
        return JsonLines(name, file, current, key)
    head = _head(file)
    signs.check_text(head[: signs.HEAD_BYTES], str(file))
    mark = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    return TextFile(name, file, current, start=mark, stop=current.size)


def _is_json_lines(file: Path) -> bool:
    return file.name.lower().endswith(ENDINGS)


def _head(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error
