"""The first row groups of a parquet file elsewhere: no more of it is fetched than is read.

Row groups lie in the file one after the other, and its end says where. So the end is read by range,
and the file is fetched from its beginning, twice as far each time. What has come is in the store:
it is not fetched again, also after a kill.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import LockstepError
from pipeline import extras
from pipeline.net import remote
from pipeline.sources.provider import FetchOptions
from pipeline.sources.text.documents import RowGroups, check_column, one_line
from pipeline.sources.token_files.fetching import fetch_files
from pipeline.sources.token_files.listing import LocationFile

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

FIRST = 2**26  # bytes that are fetched at first
END, MOST_END = 2**16, 2**26  # bytes of a file's end: what pyarrow reads first, and at most
LENGTH_OF_TEXT = 4  # bytes before each text of a page
MAGIC, LENGTH = b"PAR1", 8  # what a file ends with, and bytes of that and of the metadata's length


class FetchedPart(NamedTuple):
    """The first `size` bytes of a parquet file on this machine, and their hash.

    `groups` are the row groups in it that were not in the part before.
    """

    path: Path
    groups: RowGroups
    size: int
    sha256: str


def parts(file: LocationFile, options: FetchOptions) -> Iterator[FetchedPart]:
    """Yield larger and larger parts of a file, on demand.

    Raises:
      LockstepError: it cannot be fetched, or is not a parquet file.
    """
    metadata = _metadata(file, options)
    ends = _ends_of_groups(file, metadata)
    done = fetched = 0
    while done < len(ends):
        fetched = min(file.origin.size, max(ends[done], 2 * fetched, FIRST))
        (stored,) = fetch_files([file], options, [fetched])
        here = sum(1 for stop in ends if stop <= fetched)
        groups = RowGroups(metadata, range(done, here))
        yield FetchedPart(stored.path, groups, fetched, stored.sha256)
        done = here


def text_bytes(file: LocationFile, column: str, options: FetchOptions) -> int:
    """Return the bytes of a column's text in a file, here or elsewhere, as its metadata has them.

    They are those of its pages before compression, about; of a dictionary's texts each counts once.

    Raises:
      LockstepError: its end cannot be read, or is not a parquet file's; it has no such column.
    """
    metadata = _metadata(file, options)
    check_column(metadata.schema.to_arrow_schema(), file.label, column)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(
        max(0, part.total_uncompressed_size - LENGTH_OF_TEXT * part.num_values)
        for group in groups
        for part in map(group.column, range(group.num_columns))
        if part.path_in_schema == column
    )


def _metadata(file: LocationFile, options: FetchOptions) -> "FileMetaData":
    """Return a file's metadata, which its last bytes hold."""
    size = file.origin.size
    length = min(size, END)
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

    with one_line(file.label, pyarrow.ArrowException, "a parquet file"):
        return parquet.read_metadata(pyarrow.BufferReader(end))


def _last_bytes(file: LocationFile, length: int, options: FetchOptions) -> bytes:
    start = file.origin.size - length
    if not file.origin.is_local:
        return b"".join(remote.read(file.origin, start, file.origin.size, options.network))
    with one_line(file.label, OSError, "a file to read"), open(file.origin.url, "rb") as opened:
        opened.seek(start)
        return opened.read()


def _ends_of_groups(file: LocationFile, metadata: "FileMetaData") -> list[int]:
    """Return the offset after each row group; no group ends before the one before it."""
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
