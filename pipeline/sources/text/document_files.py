"""The documents of one file: a column of parquet, a key of JSON lines, or a whole text file.

What is no document is left out and counted, since text of the web has some of everything: a null,
an empty text, bytes that are not UTF-8, a line that is not JSON, a document of too many bytes.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pipeline.errors import LockstepError, brief
from pipeline.sources.parquet import pyarrow_for
from pipeline.sources.text.documents import unreadable

if TYPE_CHECKING:
    from pyarrow import Schema

PARQUET, TEXT = ".parquet", ".txt"
# Endings of JSON lines -> how their bytes are packed.
JSON_LINES = {
    ".jsonl": "",
    ".jsonl.gz": "gzip",
    ".json.gz": "gzip",
    ".jsonl.zst": "zstd",
    ".json.zst": "zstd",
}
ENDINGS = (PARQUET, *JSON_LINES, TEXT)
PLAIN = (TEXT, *(ending for ending, packed in JSON_LINES.items() if not packed))
DOCUMENT_BYTES = 2**26  # at most, of a document, which is read into memory
ROWS = 64  # of parquet, read at once
BUFFER = 2**20  # bytes of a parquet file, read at once

# Why something is left out.
EMPTY, NOT_UTF8, TOO_LONG = "without text", "not UTF-8", f"over {DOCUMENT_BYTES} bytes"
NOT_JSON, NO_KEY = "not a JSON object", "without the key"


def documents(path: Path, name: str, column: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the texts of a file in their order.

    Args:
      path: the file.
      name: what errors call it; its ending tells what is in it.
      column: name of the column or key of the text.
      left_out: gains how many were left out, by reason.

    Raises:
      LockstepError: it cannot be read, is damaged, or has no such column or key.
    """
    lower = name.lower()
    if lower.endswith(PARQUET):
        yield from of_row_groups(path, None, name, column, left_out)
        return
    if lower.endswith(TEXT):
        found = _of_text(path, left_out)
    else:
        packing = next(kind for ending, kind in JSON_LINES.items() if lower.endswith(ending))
        found = _of_lines(path, name, packing, column, left_out)
    for data in found:
        text = _decoded(data, left_out)
        if text is not None:
            yield text


def _decoded(data: bytes | str | None, left_out: Counter[str]) -> str | None:
    if not data:
        left_out[EMPTY] += 1
        return None
    try:
        if isinstance(data, str):
            data.encode()  # JSON may have half a surrogate pair
            return data
        return data.decode()
    except UnicodeError:
        left_out[NOT_UTF8] += 1
        return None


# ---- Parquet ----


def of_row_groups(
    given: Path | IOBase, groups: range | None, name: str, column: str, left_out: Counter[str]
) -> Iterator[str]:
    """Yield the texts in some row groups of a parquet file; None is all. See `documents`."""
    for data in _of_parquet(given, groups, name, column, left_out):
        if (text := _decoded(data, left_out)) is not None:
            yield text


def _of_parquet(
    given: Path | IOBase, groups: range | None, name: str, column: str, left_out: Counter[str]
) -> Iterator[bytes | None]:
    pyarrow = pyarrow_for(name)
    from pyarrow import compute, parquet

    with one_line(name, pyarrow.ArrowException, "a parquet file"):
        source = given if isinstance(given, Path) else pyarrow.PythonFile(given, "r")
        # in pieces: pages of a mapped file count as memory, a whole column otherwise
        file = parquet.ParquetFile(source, memory_map=False, buffer_size=BUFFER, pre_buffer=False)
        schema = file.schema_arrow
    check_column(schema, name, column)
    with one_line(name, pyarrow.ArrowException, "a whole parquet file"):
        numbers = None if groups is None else [*groups]
        for batch in file.iter_batches(ROWS, row_groups=numbers, columns=[column]):
            # as bytes: text that is not UTF-8 would end the whole batch
            data_N = batch.column(0).cast(pyarrow.large_binary())
            short_N = compute.less_equal(compute.binary_length(data_N), DOCUMENT_BYTES)
            short_N = compute.fill_null(short_N, True)  # noqa: FBT003
            kept_n = data_N.filter(short_N)
            left_out[TOO_LONG] += len(data_N) - len(kept_n)
            yield from kept_n.to_pylist()


def check_column(schema: "Schema", name: str, column: str) -> None:
    """Check that a parquet file has a column of text.

    Raises:
      LockstepError: it has no such column, several of the name, or one of something else.
    """
    pyarrow = pyarrow_for(name)
    found = schema.field(column).type if schema.names.count(column) == 1 else None
    if found not in (pyarrow.string(), pyarrow.large_string()):
        columns = brief(", ".join(f"{field.name} ({field.type})" for field in schema), 200)
        raise LockstepError(
            f"{name}: found the columns {columns}, expected {column!r} with text among them"
        )


@contextmanager
def one_line(name: str, kind: type[Exception], expected: str) -> Iterator[None]:
    """Turn errors of a library into one line."""
    try:
        yield
    except (kind, OSError, ValueError, KeyError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise LockstepError(f"{name}: {brief(line, 200)}, expected {expected}") from error


# ---- JSON lines ----


def _of_lines(
    path: Path, name: str, packing: str, key: str, left_out: Counter[str]
) -> Iterator[str | None]:
    keys: list[str] = []  # of an object that lacks the key
    found = False
    for line in _lines(path, name, packing, left_out):
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            left_out[NOT_UTF8] += 1
            continue
        except (ValueError, RecursionError):
            left_out[NOT_JSON] += 1
            continue
        if not isinstance(value, dict):
            left_out[NOT_JSON] += 1
        elif key not in value:
            keys = keys or [*value]
            left_out[NO_KEY] += 1
        else:
            found = True
            text = value[key]
            if isinstance(text, str) and len(text) > DOCUMENT_BYTES:
                left_out[TOO_LONG] += 1
            else:
                yield text if isinstance(text, str) else None
    if keys and not found:
        shown = brief(", ".join(keys), 200)
        raise LockstepError(f"{name}: found the keys {shown}, expected {key!r} among them")


def _lines(path: Path, name: str, packing: str, left_out: Counter[str]) -> Iterator[bytes]:
    """Yield the lines that are not blank, of at most DOCUMENT_BYTES."""
    try:
        with open(path, "rb") as raw, _unpacked(raw, name, packing) as file:
            while line := file.readline(DOCUMENT_BYTES + 1):
                if len(line) > DOCUMENT_BYTES:
                    left_out[TOO_LONG] += 1
                    while line and not line.endswith(b"\n"):
                        line = file.readline(DOCUMENT_BYTES)
                elif not line.isspace():
                    yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise LockstepError(f"{name}: {error}, expected whole gzip data") from error
    except OSError as error:
        if error.errno is None:  # of zstd
            line = (str(error).splitlines() or ["damaged"])[0]
            raise LockstepError(f"{name}: {brief(line, 200)}, expected whole zstd data") from error
        raise unreadable(path, error) from error


def _unpacked(raw: BinaryIO, name: str, packing: str) -> AbstractContextManager[BinaryIO]:
    openers: dict[str, Callable[[], AbstractContextManager]] = {
        "": lambda: raw,
        "gzip": lambda: gzip.GzipFile(fileobj=raw),
        "zstd": lambda: _zstd(raw, name),
    }
    return openers[packing]()


@contextmanager
def _zstd(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    import io

    pyarrow = pyarrow_for(name)
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
        yield io.BufferedReader(stream, 2**20)


# ---- Text ----


def _of_text(path: Path, left_out: Counter[str]) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            data = file.read(DOCUMENT_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > DOCUMENT_BYTES:
        left_out[TOO_LONG] += 1
    else:
        yield data.removeprefix(b"\xef\xbb\xbf")
