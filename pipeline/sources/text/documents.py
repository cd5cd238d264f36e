"""The documents of one file: a column of parquet, a key of JSON lines, or plain text.

What is no document is left out and counted, since text of the web has some of everything: a null,
an empty text, bytes that are not UTF-8, a line that is not JSON, a document of too many bytes.
Memory is bounded: a row, a line or a text is held at a time, and packed data are read only as far
as they unpack to what text may.

Of a parquet file elsewhere, no more is fetched than is read. Its row groups lie one after the
other, and its end says where. So the end is read by range, and the file is fetched from its
beginning, twice as far each time. What has come is in the store: it is not fetched again, also
after a kill.
"""

import codecs
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from lockstep.errors import LockstepError, brief, expecting
from pipeline import extras
from pipeline.net import remote
from pipeline.sources.provider import FetchOptions
from pipeline.sources.token_files.fetching import fetch_files
from pipeline.sources.token_files.listing import LocationFile
from pipeline.stage.untrusted_files import LEAST_UNPACKED, check_unpacked
from pipeline.tokens import signs

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import FileMetaData

PARQUET, TEXT = ".parquet", ".txt"
# Endings of JSON lines -> how their bytes are packed.
JSON_LINES = {
    ".jsonl": "",
    ".json": "",
    ".jsonl.gz": "gzip",
    ".json.gz": "gzip",
    ".jsonl.zst": "zstd",
    ".json.zst": "zstd",
}
READABLE = "a readable text file"
ENDINGS = (PARQUET, *JSON_LINES, TEXT)
PACKED = (PARQUET, *(ending for ending, packing in JSON_LINES.items() if packing))
DOCUMENT_BYTES = 2**26  # at most, of a document, which is read into memory
PART_BYTES = 2**11  # about, of a document of a text file that is the only one
PARQUET_BUFFER = 2**20  # bytes of a parquet file, read at once
GZIP_PADDING = 2**16  # zeros after gzip data, as tapes have them
LINES_AT_ONCE = 256  # between two looks at how far a packed file is read
ZSTD_WINDOW = "requires too much memory"  # what zstd says of a window of over 2**27 bytes
FIRST_BYTES = 2**26  # bytes that are fetched at first
END_BYTES, MOST_END = 2**16, 2**26  # bytes of a file's end: what pyarrow reads first, and at most
LENGTH_OF_TEXT = 4  # bytes before each text of a page
MAGIC, LENGTH = b"PAR1", 8  # what a file ends with, and bytes of that and of the metadata's length

# Why something is left out.
EMPTY, NOT_UTF8, TOO_LONG = "without text", "not UTF-8", f"over {DOCUMENT_BYTES} bytes"
NOT_JSON, NO_KEY = "not a JSON object", "without the key"


class RowGroups(NamedTuple):
    """Some row groups of a parquet file, whose end need not be there: it is in `metadata`."""

    metadata: "FileMetaData"
    numbers: range


def documents(
    path: Path,
    name: str,
    column: str,
    left_out: Counter[str],
    *,
    alone: bool = False,
    groups: RowGroups | None = None,
) -> Iterator[str]:
    """Yield the documents of a file in their order: its texts.

    Args:
      path: the file.
      name: what errors call it; its ending tells what is in it, and any other is of plain text.
      column: name of the column or key of the text.
      left_out: gains how many were left out, by reason.
      alone: whether it is the only file. Then a text is cut into documents of PART_BYTES, since one
        document could be trained on or held out, and not both.
      groups: the row groups of a parquet file that are read; None is all.

    Raises:
      LockstepError: it cannot be read, is damaged, or has no such column or key.
    """
    lower = name.lower()
    packing = next((kind for ending, kind in JSON_LINES.items() if lower.endswith(ending)), None)
    if lower.endswith(PARQUET):
        contents = _of_parquet(path, groups, name, column, left_out)
    elif packing is not None:
        contents = _of_lines(path, name, packing, column, left_out)
    else:
        contents = _text_documents(path, name, left_out, alone)
    for data in contents:
        if not data:
            left_out[EMPTY] += 1
            continue
        try:
            if isinstance(data, str):
                data.encode()  # JSON may have half a surrogate pair
            text = data if isinstance(data, str) else data.decode()
        except UnicodeError:
            left_out[NOT_UTF8] += 1
        else:
            yield text


# ---- Parquet ----


def _of_parquet(
    path: Path, groups: RowGroups | None, name: str, column: str, left_out: Counter[str]
) -> Iterator[bytes | None]:
    pyarrow = extras.required(name, "pyarrow")
    from pyarrow import parquet

    with _reading(name, "a parquet file"):
        # in pieces: pages of a mapped file count as memory, a whole column otherwise
        file = parquet.ParquetFile(
            path,
            metadata=groups and groups.metadata,
            memory_map=False,
            buffer_size=PARQUET_BUFFER,
            pre_buffer=False,
        )
        schema = file.schema_arrow
    _check_column(schema, name, column)
    numbers = range(file.num_row_groups) if groups is None else groups.numbers
    for group in map(file.metadata.row_group, numbers):
        for part in map(group.column, range(group.num_columns)):
            if part.path_in_schema == column:
                sizes = (part.total_compressed_size, part.total_uncompressed_size)
                check_unpacked(*sizes, f"{name}: column {brief(column)}")
    with _reading(name, "a whole parquet file"):
        # a row at once: a few bytes of a file may stand for many large texts
        for batch in file.iter_batches(1, row_groups=[*numbers], columns=[column]):
            # as bytes: text that is not UTF-8 would end the whole batch
            (data,) = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            if data is None or len(data) <= DOCUMENT_BYTES:
                yield data
            else:
                left_out[TOO_LONG] += 1


def _check_column(schema: "Schema", name: str, column: str) -> None:
    """Check that a parquet file of documents has one column of this name, of text."""
    from pyarrow import types

    # a shard may have nothing but nulls
    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    checks += (types.is_binary, types.is_large_binary, types.is_binary_view)
    kind = schema.field(column).type if schema.names.count(column) == 1 else None
    if kind is not None and types.is_dictionary(kind):  # such as categories of pandas
        kind = kind.value_type
    if kind is None or not any(check(kind) for check in checks):
        columns = brief(", ".join(f"{field.name} ({field.type})" for field in schema), 200)
        raise LockstepError(
            f"{name}: found the columns {columns}, expected {column!r} with text among them"
        )


def _reading(name: str, expected: str) -> AbstractContextManager[None]:
    from pyarrow import ArrowException

    return expecting(name, expected, ArrowException, OSError, ValueError, KeyError)


# ---- JSON lines ----


def _of_lines(
    path: Path, name: str, packing: str, key: str, left_out: Counter[str]
) -> Iterator[str | None]:
    keys: list[str] = []  # of an object that lacks the key
    found = False
    for line in _lines(path, name, packing):
        if line is None:
            left_out[TOO_LONG] += 1
            continue
        try:  # as UTF-8: of bytes, json guesses the encoding of each line
            value = json.loads(line.decode())
        except UnicodeDecodeError:
            left_out[NOT_UTF8] += 1
            continue
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            left_out[NOT_JSON] += 1
        elif key not in value:
            keys = keys or [*value]
            left_out[NO_KEY] += 1
        else:
            found = True
            yield value[key] if isinstance(value[key], str) else None
    if keys and not found:
        shown = brief(", ".join(keys), 200)
        raise LockstepError(f"{name}: found the keys {shown}, expected {key!r} among them")


def _lines(path: Path, name: str, packing: str) -> Iterator[bytes | None]:
    """Yield a file's lines of documents that are not blank; None in place of one too long."""
    number = 0
    try:
        with open(path, "rb") as raw, _unpacked(raw, name, packing) as file:
            numbered = _numbered(raw, file, name, is_packed=bool(packing))
            first = [*islice(numbered, 2)]
            signs.check_lines([line or b"" for _, line in first], name)
            for number, line in chain(first, numbered):  # noqa: B007 - an error says it
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise LockstepError(
            f"{name}: after line {number}: {error}, expected whole gzip data"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise LockstepError(f"{path}: {error.strerror}, expected {READABLE}") from error
        line = (str(error).splitlines() or ["damaged"])[0]
        expected = "whole zstd data"
        if ZSTD_WINDOW in line:
            expected = "a window of 2**27 bytes at most: zstd -d --long=31 FILE unpacks it"
        raise LockstepError(f"{name}: {brief(line, 200)}, expected {expected}") from error


def _numbered(
    raw: BinaryIO, file: BinaryIO, name: str, *, is_packed: bool
) -> Iterator[tuple[int, bytes | None]]:
    number = unpacked = position = 0
    is_cut, allowed = False, LEAST_UNPACKED if is_packed else float("inf")
    while line := file.readline(DOCUMENT_BYTES + 1):
        number += 1
        unpacked += len(line)
        if unpacked > allowed or number % LINES_AT_ONCE == 0:
            position = raw.tell()
        if unpacked > allowed:
            allowed = check_unpacked(position, unpacked, name)
        if number == 1:
            signs.check_text(line[: signs.HEAD_BYTES], name)
            line = line.removeprefix(codecs.BOM_UTF8)
        if is_cut or len(line) > DOCUMENT_BYTES:
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
        if self._zeros > GZIP_PADDING:
            raise gzip.BadGzipFile(f"over {GZIP_PADDING} zeros after its end")
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
    pyarrow = extras.required(name, "pyarrow")
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
        yield io.BufferedReader(stream, 2**20)


# ---- Text ----


def _text_documents(path: Path, name: str, left_out: Counter[str], alone: bool) -> Iterator[bytes]:
    most = PART_BYTES if alone else DOCUMENT_BYTES + 1
    with expecting(path, READABLE), open(path, "rb") as file:
        data = file.read(most)
        signs.check_text(data[: signs.HEAD_BYTES], name)
        data = data.removeprefix(codecs.BOM_UTF8)
        if alone:
            yield from _parts(data, file)
        elif len(data) > DOCUMENT_BYTES:
            left_out[TOO_LONG] += 1
        else:
            yield data


def _parts(data: bytes, file: BinaryIO) -> Iterator[bytes]:
    """Cut a document's text after the last line in each PART_BYTES, else a word or character."""
    while chunk := file.read(PART_BYTES):
        # so that no character is cut: its first byte is the last that is not 0b10xxxxxx
        tail = range(max(0, len(data) - 4), len(data))
        character = max((i for i in tail if data[i] & 192 != 128), default=len(data))
        cut = data.rfind(b"\n") + 1 or data.rfind(b" ") + 1 or character
        if cut:
            yield data[:cut]
        data = data[cut:] + chunk
    yield data


# ---- Parquet elsewhere ----


class FetchedPart(NamedTuple):
    """The first `size` bytes of a parquet file on this machine, and their hash.

    `groups` are the row groups in it that were not in the part before.
    """

    path: Path
    groups: RowGroups
    size: int
    sha256: str


def fetched_parts(file: LocationFile, options: FetchOptions) -> Iterator[FetchedPart]:
    """Yield larger and larger parts of a parquet file elsewhere, on demand."""
    metadata = _metadata(file, options)
    ends = _ends_of_groups(file, metadata)
    done = fetched = 0
    while done < len(ends):
        fetched = min(file.origin.size, max(ends[done], 2 * fetched, FIRST_BYTES))
        (stored,) = fetch_files([file], options, [fetched])
        complete = sum(1 for stop in ends if stop <= fetched)
        groups = RowGroups(metadata, range(done, complete))
        yield FetchedPart(stored.path, groups, fetched, stored.sha256)
        done = complete


def parquet_text_bytes(file: LocationFile, column: str, options: FetchOptions) -> int:
    """Return the bytes of a column's text in a file, here or elsewhere, as its metadata has them.

    They are about those of its pages before compression; each text of a dictionary counts once.
    """
    metadata = _metadata(file, options)
    _check_column(metadata.schema.to_arrow_schema(), file.label, column)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        max(0, part.total_uncompressed_size - LENGTH_OF_TEXT * part.num_values)
        for group in groups
        for part in map(group.column, range(group.num_columns))
        if part.path_in_schema == column
    )


def _metadata(file: LocationFile, options: FetchOptions) -> "FileMetaData":
    """Return a parquet file's metadata, which its last bytes hold."""
    size = file.origin.size
    length = min(size, END_BYTES)
    for _ in range(2):
        end = _last_bytes(file, length, options)
        needed = int.from_bytes(end[-LENGTH : -len(MAGIC)], "little") + LENGTH
        if not end.endswith(MAGIC) or needed > min(size, MOST_END):
            raise LockstepError(f"{file.label}: ends in {end[-4:]!r}, expected a parquet file")
        if needed <= length:
            break
        length = needed
    pyarrow = extras.required(file.label, "pyarrow")
    from pyarrow import parquet

    with _reading(file.label, "a parquet file"):
        return parquet.read_metadata(pyarrow.BufferReader(end))


def _last_bytes(file: LocationFile, length: int, options: FetchOptions) -> bytes:
    start = file.origin.size - length
    if not file.origin.is_local:
        return b"".join(remote.read(file.origin, start, file.origin.size, options.network))
    with expecting(file.label, "a file to read"), open(file.origin.url, "rb") as opened:
        opened.seek(start)
        return opened.read()


def _ends_of_groups(file: LocationFile, metadata: "FileMetaData") -> list[int]:
    """Return the offset after each row group of parquet; none ends before the one before."""
    ends: list[int] = []
    for number in range(metadata.num_row_groups):
        group, last = metadata.row_group(number), ends[-1] if ends else 0
        for column in map(group.column, range(group.num_columns)):
            start = column.dictionary_page_offset or column.data_page_offset
            last = max(last, start + column.total_compressed_size)
        ends.append(last)
    if ends and not 0 < ends[-1] <= file.origin.size:
        raise LockstepError(
            f"{file.label}: a row group ends at byte {ends[-1]}, expected it in the "
            f"{file.origin.size} bytes of the file"
        )
    return ends
