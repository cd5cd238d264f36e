"""The documents of one file: a column of parquet, a key of JSON lines, or a whole text file.

What is no document is left out and counted, since text of the web has some of everything: a null,
an empty text, bytes that are not UTF-8, a line that is not JSON, a document of too many bytes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError, brief
from pipeline.sources.parquet import pyarrow_for
from pipeline.sources.text.documents import unreadable
from pipeline.sources.text.line_files import JSON_LINES, Lines
from pipeline.stage.given_files import check_unpacked
from pipeline.tokens import signs

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

PARQUET, TEXT = ".parquet", ".txt"
ENDINGS = (PARQUET, *JSON_LINES, TEXT)
PLAIN = (TEXT, *(ending for ending, packed in JSON_LINES.items() if not packed))
DOCUMENT_BYTES = 2**26  # at most, of a document, which is read into memory
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
        found = _of_text(path, name, left_out)
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
    from pyarrow import parquet

    with one_line(name, pyarrow.ArrowException, "a parquet file"):
        source = given if isinstance(given, Path) else pyarrow.PythonFile(given, "r")
        # in pieces: pages of a mapped file count as memory, a whole column otherwise
        file = parquet.ParquetFile(source, memory_map=False, buffer_size=BUFFER, pre_buffer=False)
        schema = file.schema_arrow
    check_column(schema, name, column)
    _check_unpacked(file, groups, name, column)
    with one_line(name, pyarrow.ArrowException, "a whole parquet file"):
        numbers = None if groups is None else [*groups]
        # a row at once: a few bytes of a file may stand for many large texts
        for batch in file.iter_batches(1, row_groups=numbers, columns=[column]):
            # as bytes: text that is not UTF-8 would end the whole batch
            (data,) = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            if data is None or len(data) <= DOCUMENT_BYTES:
                yield data
            else:
                left_out[TOO_LONG] += 1


def _check_unpacked(file: "ParquetFile", groups: range | None, name: str, column: str) -> None:
    """Check of each row group what its texts unpack to, by the file's metadata."""
    metadata = file.metadata
    for group in map(metadata.row_group, groups or range(metadata.num_row_groups)):
        for part in map(group.column, range(group.num_columns)):
            if part.path_in_schema == column:
                sizes = (part.total_compressed_size, part.total_uncompressed_size)
                check_unpacked(*sizes, f"{name}: column {brief(column)}")


def check_column(schema: "Schema", name: str, column: str) -> None:
    """Check that a parquet file has a column of text.

    Raises:
      LockstepError: it has no such column, several of the name, or one of something else.
    """
    pyarrow_for(name)
    from pyarrow import types

    # a shard may have nothing but nulls
    of_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    of_text += (types.is_binary, types.is_large_binary, types.is_binary_view)
    found = schema.field(column).type if schema.names.count(column) == 1 else None
    if found is not None and types.is_dictionary(found):  # such as categories of pandas
        found = found.value_type
    if found is None or not any(says(found) for says in of_text):
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
    for _, line in Lines(path, name, packing, DOCUMENT_BYTES):
        if line is None:
            left_out[TOO_LONG] += 1
            continue
        try:  # as UTF-8: of bytes, json guesses the encoding of each line
            value = json.loads(line.decode())
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


# ---- Text ----


def _of_text(path: Path, name: str, left_out: Counter[str]) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            data = file.read(DOCUMENT_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    signs.check_text(data[: signs.HEAD_BYTES], name)
    if len(data) > DOCUMENT_BYTES:
        left_out[TOO_LONG] += 1
    else:
        yield data.removeprefix(b"\xef\xbb\xbf")
