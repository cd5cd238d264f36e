"""What a file of text is to a corpus: documents, split and read in pieces, in constant memory."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline.errors import LockstepError
from pipeline.stage.progress import Progress

PIECE = 2**17  # characters


class Piece(NamedTuple):
    """A document's text, or a part of it; `ends` where nothing of the document follows."""

    text: str
    ends: bool


class Version(NamedTuple):
    """What tells that a file was changed: its size in bytes, and when it was last written to."""

    size: int
    nanoseconds: int


class Source(Protocol):
    """A file of documents, or some of them.

    Attributes:
      name: its path in the corpus, with slashes.
      path: where it lies.
      version: as it was found.
      size: bytes on the disk of what is read.
    """

    name: str
    path: Path
    version: Version

    @property
    def size(self) -> int: ...

    def split(self, percent: float, bar: Progress) -> tuple["Source", "Source | None"]:
        """The train part and the held-out part, None where nothing fits into `percent` of it."""
        ...

    def pieces(self, bar: Progress) -> Iterator[Piece]:
        """Reads it; the bar moves by bytes on the disk, `size` in all."""
        ...


def cut(texts: Iterable[str]) -> Iterator[Piece]:
    """One document in pieces of at most PIECE characters.

    A longer one is cut behind a line's end that stands between two letters or signs, where common
    tokenizers cut too, so that the tokens are those of the whole. Where a piece has none, it is cut
    in front of a line's end, else of a space, else anywhere; that may change the token there.

    Args:
      texts: the document, in parts of at most PIECE characters.
    """
    rest = ""
    for text in texts:
        rest += text
        while len(rest) > PIECE:
            at = _border(rest)
            yield Piece(rest[:at], ends=False)
            rest = rest[at:]
    if rest:
        yield Piece(rest, ends=True)


def _border(text: str) -> int:
    """Where to cut a text of more than PIECE characters."""
    front = 0
    line = text.rfind("\n", 1, PIECE)
    while line > 0:
        if not text[line - 1].isspace():
            if not text[line + 1].isspace():
                return line + 1
            front = front or line
        line = text.rfind("\n", 1, line)
    return front or max(0, text.rfind(" ", 1, PIECE)) or PIECE


def version(path: Path) -> Version:
    """The version of a file.

    Raises:
      LockstepError: there is no such file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return Version(status.st_size, status.st_mtime_ns)


def check_unchanged(source: Source) -> None:
    """Sees that a file is still what it was when it was found.

    Raises:
      LockstepError: it was changed meanwhile.
    """
    if version(source.path) != source.version:
        raise LockstepError(
            f"{source.path}: changed while it was read, expected a file that nobody writes to"
        )


def unreadable(path: Path, error: OSError) -> LockstepError:
    """What is said of a file that the system does not read."""
    return LockstepError(f"{path}: {error.strerror or error}, expected text to read")
