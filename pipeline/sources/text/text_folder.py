"""The files of a corpus that a user names: one file, or all of a folder.

A file is JSON lines where its name ends in .jsonl or .jsonl.gz, and text where it does not.
"""

import codecs
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.sources.text.documents import Source, unreadable, version
from pipeline.sources.text.json_lines import ENDINGS, JsonLines
from pipeline.sources.text.text_file import TextFile

HEAD_BYTES = 8000  # a NUL in so many tells a file that is no text, as git has it
PATH = "model.LLM.data_location.Corpus.path"

# Why a file is left out, in words.
EMPTY, BINARY, LINKS = "empty files", "files that are no text", "links that lead elsewhere"


def find(path: Path, key: str) -> tuple[list[Source], tuple[str, ...]]:
    """The files with any text in them, by name; and a line for each kind that was left out.

    Of a folder: all files below it but hidden ones and those in hidden folders. Left out with a
    warning: empty files, files with a NUL at their beginning, and links to a folder or to a file
    that lies outside.

    Args:
      path: a file or a folder.
      key: of the text in a JSON line.

    Raises:
      LockstepError: there is nothing, or nothing that can be read; or it holds no text.
    """
    if path.is_dir():
        named = dict(sorted(_walk(path)))
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


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder, and the links to folders, by their names in it."""

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for parent, folders, names in os.walk(root, onerror=fail):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        links = [folder for folder in folders if Path(parent, folder).is_symlink()]
        for name in (*names, *links):
            if not name.startswith("."):
                path = Path(parent, name)
                yield path.relative_to(root).as_posix(), path


def _left_out(root: Path, file: Path) -> str | None:
    """Why a file is not read, or None."""
    if file.is_symlink() and root.is_dir():
        inside = file.is_file() and file.resolve().is_relative_to(root.resolve())
        if not inside:
            return LINKS
    if not file.is_file():  # a socket, or what a program waits for
        return BINARY
    if not version(file).size:
        return EMPTY
    if root.is_dir() and not _is_json_lines(file) and b"\0" in _head(file):
        return BINARY
    return None


def _source(name: str, file: Path, key: str) -> Source:
    found = version(file)
    if _is_json_lines(file):
        return JsonLines(name, file, found, key)
    mark = len(codecs.BOM_UTF8) if _head(file).startswith(codecs.BOM_UTF8) else 0
    return TextFile(name, file, found, start=mark, stop=found.size)


def _is_json_lines(file: Path) -> bool:
    return file.name.lower().endswith(ENDINGS)


def _head(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error
