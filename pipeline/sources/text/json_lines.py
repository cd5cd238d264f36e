"""A file of JSON lines, plain or compressed by gzip: each line is an object with one document."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lockstep.errors import LockstepError
from pipeline.sources.text.documents import PIECE, Piece, Source, cut
from pipeline.sources.text.line_files import Lines
from pipeline.stage.progress import Progress

ENDINGS = (".jsonl", ".jsonl.gz")
LINE_BYTES = 2**28  # at most: a line is read into memory
BINS = 2**16
SHOWN = 5  # keys of an object in an error message


@dataclass(frozen=True, eq=False)
class JsonLines(Source):
    """The documents of a file, or its train or held-out documents.

    The first two bytes of the SHA-256 of `name:line number` give a document's bin.

    Args:
      name, path, version: as of any source.
      key: key of the text in each object.
      bins: whether the documents of each of the BINS bins are read; None is all.
    """

    key: str
    bins: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.version.size

    def split(self, percent: float, bar: Progress) -> tuple["JsonLines", "JsonLines | None"]:
        """Hold out bins of documents, in order, as long as they fit into `percent` of all bytes.

        The order does not depend on other documents, so a longer file holds out nearly the same
        ones. This reads the file once more, and needs no memory for each document.

        Raises:
          LockstepError: it cannot be read.
        """
        bytes_B = np.zeros(BINS, np.int64)
        for number, line in self._lines(bar):
            bytes_B[self._bin(number)] += len(line)
        held_out_B, room = np.zeros(BINS, bool), bytes_B.sum() * percent / 100
        for index in np.flatnonzero(bytes_B):
            if bytes_B[index] <= room:
                held_out_B[index] = True
                room -= bytes_B[index]
        if not held_out_B.any():
            return self, None
        return replace(self, bins=~held_out_B), replace(self, bins=held_out_B)

    def pieces(self, bar: Progress) -> Iterator[Piece]:
        """Yield the documents that have text.

        Raises:
          LockstepError: it cannot be read, or a line is not an object with a text; names the line.
        """
        for number, line in self._lines(bar):
            if self.bins is None or self.bins[self._bin(number)]:
                text = self._text(number, line)
                yield from cut(text[at : at + PIECE] for at in range(0, len(text), PIECE))

    def _bin(self, number: int) -> int:
        digest = hashlib.sha256(f"{self.name}:{number}".encode()).digest()
        return int.from_bytes(digest[:2], "big")

    def _text(self, number: int, line: bytes) -> str:
        where = f"{self.path}: line {number}"
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise LockstepError(
                f"{where}: found byte 0x{line[error.start]:02x} at byte {error.start} of the line, "
                "expected UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:  # also numbers that are too long
            raise LockstepError(f"{where}: expected a JSON object: {error}") from error
        if not isinstance(value, dict):
            raise LockstepError(
                f"{where}: found {_shown(value)}, expected an object with the key {self.key!r}"
            )
        if self.key not in value:
            keys = ", ".join(f"{key!r:.40}" for key in [*value][:SHOWN]) or "none"
            raise LockstepError(
                f"{where}: found the keys {keys}, expected {self.key!r} (text_key) among them"
            )
        text = value[self.key]
        if not isinstance(text, str):
            raise LockstepError(f"{where}: {self.key!r} is {_shown(text)}, expected a string")
        if b"\\u" in line:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise LockstepError(
                    f"{where}: {self.key!r} has half a surrogate pair, "
                    f"U+{ord(text[error.start]):04X}, at character {error.start}, expected Unicode"
                ) from error
        return text

    def _lines(self, bar: Progress) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers, from 1."""
        packing = "gzip" if self.path.suffix.lower() == ".gz" else ""
        lines, at = Lines(self.path, str(self.path), packing, LINE_BYTES), 0
        for number, line in lines:
            if line is None:
                raise LockstepError(
                    f"{self.path}: line {number}: over {LINE_BYTES} bytes, expected lines of one "
                    "document each"
                )
            yield number, line
            bar.advance(lines.at - at)
            at = lines.at
        bar.advance(self.size - at)


def _shown(value: object) -> str:
    """Return a JSON value for an error message; of an object or a list, its kind."""
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return f"{json.dumps(value):.60}"
