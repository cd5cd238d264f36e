"""A text file: one document."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.errors import LockstepError
from pipeline.sources.text.documents import PIECE, Piece, Source, cut, unreadable
from pipeline.stage.progress import Progress

BLOCK = PIECE  # bytes: at most so many characters


@dataclass(frozen=True)
class TextFile(Source):
    """One document: the bytes from `start` to `stop` of a text file.

    Args:
      name, path, version: as of any source.
      start: offset of the first byte.
      stop: offset after the last byte.
      errors: "strict", or "replace" to read invalid UTF-8 as U+FFFD.
    """

    start: int
    stop: int
    errors: str = "strict"

    @property
    def size(self) -> int:
        """Bytes of the document."""
        return self.stop - self.start

    def split(self, percent: float, bar: Progress) -> tuple["TextFile", "TextFile | None"]:
        """Hold out the last `percent` of its bytes, from the first line or else word in them.

        Raises:
          LockstepError: it cannot be read.
        """
        target = self.stop - int(self.size * percent / 100)
        start = max(self.start, target - 1)
        border = self._after(b"\n", start) or self._after(b" ", start)
        bar.advance(self.size)
        if border is None:
            return self, None
        return replace(self, stop=border), replace(self, start=border)

    def pieces(self, bar: Progress) -> Iterator[Piece]:
        """Yield the document.

        Raises:
          LockstepError: it cannot be read, or is not UTF-8; names the byte.
        """
        yield from cut(self._decoded(bar))

    def _decoded(self, bar: Progress) -> Iterator[str]:
        decoder, at = codecs.getincrementaldecoder("utf-8")(self.errors), self.start
        for block in self._blocks(self.start):
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=at + len(block) == self.stop)
            except UnicodeDecodeError as error:
                byte = at - pending + error.start
                raise LockstepError(
                    f"{self.path}: found byte 0x{error.object[error.start]:02x} at byte {byte}, "
                    "expected UTF-8"
                ) from error
            at += len(block)
            bar.advance(len(block))

    def _after(self, byte: bytes, start: int) -> int | None:
        """Return the offset after the first such byte from `start` on, unless it is the last."""
        at = start
        for block in self._blocks(start):
            if (found := block.find(byte)) >= 0:
                return at + found + 1 if at + found + 1 < self.stop else None
            at += len(block)
        return None

    def _blocks(self, start: int) -> Iterator[bytes]:
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                while block := file.read(min(BLOCK, self.stop - file.tell())):
                    yield block
        except OSError as error:
            raise unreadable(self.path, error) from error
