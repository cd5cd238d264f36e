"""The lines of a file of JSON lines, plain or packed by gzip or zstd, in bounded memory."""

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import LockstepError, brief
from pipeline.sources.parquet import pyarrow_for
from pipeline.sources.text.documents import unreadable
from pipeline.stage.given_files import LEAST_UNPACKED, check_unpacked
from pipeline.tokens import signs

# Endings of JSON lines -> how their bytes are packed.
JSON_LINES = {
    ".jsonl": "",
    ".json": "",
    ".jsonl.gz": "gzip",
    ".json.gz": "gzip",
    ".jsonl.zst": "zstd",
    ".json.zst": "zstd",
}
PADDING = 2**16  # zeros after gzip data, as tapes have them
AT_ONCE = 256  # lines between two looks at how far the file is read
WINDOW = "requires too much memory"  # what zstd says of a window of over 2**27 bytes


class Lines:
    """The lines that are not blank, with their numbers from 1; None in place of one too long.

    Args:
      path: the file.
      name: what errors call it.
      packing: "", "gzip" or "zstd".
      most: bytes of a line.

    Attributes:
      at: bytes of the file that were read, or a little less.
    """

    def __init__(self, path: Path, name: str, packing: str, most: int):
        self.path, self.name, self.packing, self.most, self.at = path, name, packing, most, 0

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield them.

        Raises:
          LockstepError: the file cannot be read, is damaged, says that it is something else, or
            unpacks to what no text does.
        """
        number = 0
        try:
            with open(self.path, "rb") as raw, _unpacked(raw, self.name, self.packing) as file:
                lines = self._lines(raw, file)
                first = [*islice(lines, 2)]
                signs.check_lines([line or b"" for _, line in first], self.name)
                for number, line in chain(first, lines):
                    yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise LockstepError(
                f"{self.name}: after line {number}: {error}, expected whole gzip data"
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise unreadable(self.path, error) from error
            line = (str(error).splitlines() or ["damaged"])[0]
            expected = "whole zstd data"
            if WINDOW in line:
                expected = "a window of 2**27 bytes at most: zstd -d --long=31 FILE unpacks it"
            raise LockstepError(f"{self.name}: {brief(line, 200)}, expected {expected}") from error

    def _lines(self, raw: BinaryIO, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        number = unpacked = 0
        is_cut, allowed = False, LEAST_UNPACKED if self.packing else float("inf")
        while line := file.readline(self.most + 1):
            number += 1
            unpacked += len(line)
            if unpacked > allowed or number % AT_ONCE == 0:
                self.at = raw.tell()
            if unpacked > allowed:
                allowed = check_unpacked(self.at, unpacked, self.name)
            if number == 1:
                signs.check_text(line[: signs.HEAD_BYTES], self.name)
                line = line.removeprefix(codecs.BOM_UTF8)
            if is_cut or len(line) > self.most:
                if is_cut:  # the rest of a line that was too long
                    number -= 1
                else:
                    yield number, None
                is_cut = not line.endswith(b"\n")
            elif line and not line.isspace():
                yield number, line


class _Packed:
    """A gzip file, after whose end are few zeros: the library reads them one by one, for ever."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._zeros = raw, 0

    def read(self, size: int) -> bytes:
        data = self._raw.read(size)
        self._zeros = self._zeros + 1 if data == b"\0" else 0
        if self._zeros > PADDING:
            raise gzip.BadGzipFile(f"over {PADDING} zeros after its end")
        return data


def _unpacked(raw: BinaryIO, name: str, packing: str) -> AbstractContextManager[BinaryIO]:
    openers: dict[str, Callable[[], AbstractContextManager]] = {
        "": lambda: raw,
        "gzip": lambda: gzip.GzipFile(fileobj=_Packed(raw)),
        "zstd": lambda: _zstd(raw, name),
    }
    return openers[packing]()


@contextmanager
def _zstd(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    pyarrow = pyarrow_for(name)
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
        yield io.BufferedReader(stream, 2**20)
