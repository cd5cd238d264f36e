"""Text files of a corpus: documents, split and read in pieces, in constant memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from pipeline.stage.given_files import FileStamp
from pipeline.stage.progress import Progress

PIECE = 2**17  # characters


class Piece(NamedTuple):
    """A document's text, or a part of it; `ends` if it is the last."""

    text: str
    ends: bool


@dataclass(frozen=True)
class Source(ABC):
    """A file of documents, or some of them.

    Args:
      name: path in the corpus, with slashes.
      path: path on the disk.
      version: size and time when it was found.
    """

    name: str
    path: Path
    version: FileStamp

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes on the disk of what is read."""

    @abstractmethod
    def split(self, percent: float, bar: Progress) -> tuple["Source", "Source | None"]:
        """Return the train part and the held-out part, None if `percent` is too little."""

    @abstractmethod
    def pieces(self, bar: Progress) -> Iterator[Piece]:
        """Yield its documents; the bar advances by bytes on the disk, `size` in all."""


def cut(texts: Iterable[str]) -> Iterator[Piece]:
    """Yield a document, given in parts of at most PIECE characters, in pieces of at most as many.

    A longer one is cut after a line break between two non-space characters, where common tokenizers
    cut too, so that the tokens are those of the whole. A piece without one is cut before a line
    break, else before a space, else anywhere; that may change the token there.
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
    """Return where to cut a text of more than PIECE characters."""
    front = 0
    line = text.rfind("\n", 1, PIECE)
    while line > 0:
        if not text[line - 1].isspace():
            if not text[line + 1].isspace():
                return line + 1
            front = front or line
        line = text.rfind("\n", 1, line)
    return front or max(0, text.rfind(" ", 1, PIECE)) or PIECE


@contextmanager
def saying(left_out: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Add what was left out to an error that ends the block, since it may be why it ends.

    `left_out` returns a line for each reason.
    """
    try:
        yield
    except LockstepError as error:
        error.args = ("; ".join([*error.args, *left_out()]),)
        raise


def unreadable(path: Path, error: OSError) -> LockstepError:
    """Return the error for a file that the system does not read."""
    return LockstepError(f"{path}: {error.strerror or error}, expected a readable text file")
