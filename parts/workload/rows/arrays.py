"""Arrays of examples, for a workload: of files of this machine, or of its own `dataset(split)`.

`data_location.Arrays` are .npy, .npz and safetensors, read a slice of their first axis at a time.
What NumPy wrote is read as a stream, and no pickle is ever loaded. A folder of .npy files is an
array of each; of .npz or safetensors files each has all arrays, of some of the examples.

`data_location.Workload` asks the workload by `FetchOptions.dataset`: this room starts no process.
"""

import hashlib
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import check_regular_file, sha256_file
from lockstep.tables.variant import variant_name
from lockstep.transcript.tensorfile import TensorFile
from parts.workload.rows.writing import (
    Examples,
    Sliced,
    counts_of,
    examples_of,
    most_rows,
    same_rows,
    warnings_of,
    write_arrays,
)
from parts.workload.tables import DataArrays, DataWorkload
from pipeline.net.host import check_name
from pipeline.runfile.data import Limit
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.untrusted_files import A_FILE_OF_ARRAYS, check_file, expand, unchanged
from pipeline.tokens import signs
from pipeline.tokens.rows import WORD
from pipeline.tokens.shards import Split

AnyArrays: TypeAlias = DataArrays | DataWorkload
PATH = "model.LLM.data_location.Arrays"
KINDS = (".npy", ".npz", ".safetensors")
MOST_ARRAYS = 1000  # of a file; as many members are open at once


class ArrayData(NamedTuple):
    """Examples of each split; where they are, for people and errors; files by their names, if any.

    Files are named in the folder that they are in; a workload's own examples are in none.
    """

    read: str
    where: str
    files: dict[str, Path]
    splits: dict[Split, list[Examples]]


def survey(location: AnyArrays, options: FetchOptions) -> Survey:
    """Describe what a run would read; headers are read, and no values."""
    data = _find(location, options)
    words = same_rows(data.splits, data.where).words
    totals = {split: sum(group.count for group in groups) for split, groups in data.splits.items()}
    counts = counts_of(totals, location.held_out_percent, data.where)
    files = []
    for split, most in most_rows(options.limit, words, data.where).items():
        count = counts[split] if most is None else min(most, counts[split])
        if count:
            files.append(SurveyedFile(data.read, split, count * words * WORD, count * words))
    warnings = warnings_of(counts, data.where, options)
    return Survey(data.read, tuple(files), 1, warnings, row_words=words)


def source_sha256(location: AnyArrays, options: FetchOptions) -> str | None:
    """Return the SHA-256 of the files, if there are any and `fetch` would read all of them."""
    if options.limit is not None or isinstance(location, DataWorkload):
        return None
    return listing_sha256(_contents(_find(location, options)))


def fetch(location: AnyArrays, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of the arrays that a run file names, or that its workload gives.

    Raises:
      LockstepError: no array is there, they do not fit together, a value is not a finite number, a
        file changes meanwhile, or a split has no row.
    """
    data = _find(location, options)
    with unchanged(data.files.values()):
        written = write_arrays(folder, data.splits, data.where, location.held_out_percent, options)
        contents = _contents(data)
    if not data.files:
        row = hashlib.sha256(written.rows.model_dump_json().encode()).hexdigest()
        contents = [("rows", row), *((file.path, file.sha256) for file in written.files)]
    return Fetched(
        files=written.files,
        token_size_in_bytes=WORD,
        vocab_size=None,
        shuffle=location.shuffle,
        rows=written.rows,
        source={
            "read": data.read,
            **({"files": list(data.files)} if data.files else {}),
            "rows": written.counts,
            "sha256": listing_sha256(contents),
        },
        warnings=warnings_of(written.counts, data.where, options),
    )


def _contents(data: ArrayData) -> list[tuple[str, str]]:
    return [(name, sha256_file(path)) for name, path in data.files.items()]


def _find(location: AnyArrays, options: FetchOptions) -> ArrayData:
    if isinstance(location, DataArrays):
        read, where = location.path, f"{PATH}: {location.path}"
        return ArrayData(read, where, *_find_files(location, options.limit))
    where = variant_name(location)
    if options.dataset is None:
        raise LockstepError(
            f"{where}: found no workload, expected [workload] factory to name one with a method "
            "dataset(split)"
        )
    arrays = options.dataset()
    splits = {
        split: [examples_of(f'{where}: dataset("{split}")', partial(nullcontext, arrays[split]))]
        for split in (TRAIN, HELD_OUT)
        if arrays.get(split)
    }
    return ArrayData("dataset of the workload", where, {}, splits)


def _find_files(
    location: DataArrays, limit: Limit | None
) -> tuple[dict[str, Path], dict[Split, list[Examples]]]:
    root = expand(location.path, PATH)
    most = limit.files if limit else None
    if not root.is_dir():
        if not root.exists():
            raise LockstepError(
                f"{PATH}: found no {root.absolute()}, expected a folder or a file of "
                f"{', '.join(KINDS)}"
            )
        return {root.name: root}, {TRAIN: [_read_file(root)]}
    paths, groups = _read_folder(root)
    if not paths:
        raise LockstepError(f"{root}: found no file that ends in {', '.join(KINDS)}, expected some")
    held_out: list[Path] = []
    splits = {TRAIN: groups, HELD_OUT: []}
    if len(groups) == len(paths):  # each file has examples, and not one array of all of them
        named = signs.held_out_beside(path.name for path in paths)
        splits[TRAIN] = []
        for path, group in zip(paths, groups, strict=True):
            splits[HELD_OUT if path.name in named else TRAIN].append(group)
        held_out = [path for path in paths if path.name in named]
        paths = [path for path in paths if path.name not in named][:most]
    splits[TRAIN] = splits[TRAIN][:most]
    if (root / HELD_OUT).is_dir():
        more = _read_folder(root / HELD_OUT)
        held_out, splits[HELD_OUT] = held_out + more[0], splits[HELD_OUT] + more[1]
    return {p.relative_to(root).as_posix(): p for p in [*paths, *held_out]}, splits


# ---- Files of arrays ----


def _read_folder(root: Path) -> tuple[list[Path], list[Examples]]:
    """Return the files of arrays in a folder, not below it, by name; and what is in them."""
    paths = sorted(
        path
        for path in root.iterdir()
        if path.suffix in KINDS and path.name[0] != "." and not path.is_dir()
    )
    for path in paths:
        check_name(path.name, str(root))
        check_file(path, root)
    kinds = sorted({path.suffix for path in paths})
    if len(kinds) > 1:
        raise LockstepError(f"{root}: found {' and '.join(kinds)} files, expected one kind")
    if kinds == [".npy"]:
        return paths, [examples_of(str(root), partial(_open_npy, paths))]
    return paths, [_read_file(path) for path in paths]


def _read_file(path: Path) -> Examples:
    """Return what is in one file of arrays."""
    check_regular_file(path)
    if path.suffix not in KINDS:
        raise LockstepError(f"{path}: expected a file that ends in {', '.join(KINDS)}")
    opened = {
        ".npy": partial(_open_npy, [path]),
        ".npz": partial(_open_npz, path),
        ".safetensors": partial(_open_safetensors, path),
    }
    return examples_of(str(path), opened[path.suffix])


# ---- NumPy's files ----


class _Streamed:
    """An array in a stream: slices of its first axis, one after the other."""

    def __init__(self, stream: BinaryIO, where: str):
        self._stream, self._where, self._next = stream, where, 0
        self.shape, fortran, self.dtype = _read_header(stream)
        if self.dtype.hasobject:
            raise ValueError("found Python objects")
        if fortran and len(self.shape) > 1:
            raise ValueError("found columns first (Fortran order), expected C order")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"found shape {self.shape}")

    def __getitem__(self, examples: slice) -> np.ndarray:
        start, stop, _ = examples.indices(self.shape[0])
        assert start == self._next, f"{start} after {self._next}"
        shape = (stop - start, *self.shape[1:])
        with expecting(self._where, *A_FILE_OF_ARRAYS):
            values = np.empty(shape, self.dtype)
            buffer = memoryview(values.reshape(-1).view(np.uint8))
            done = 0
            while done < len(buffer):
                piece = self._stream.readinto(buffer[done:])
                if not piece:
                    break
                done += piece
            last = stop == self.shape[0]
            more = self._stream.read(1) if last else b""  # a zip file's checksum is at its end
        if done < len(buffer) or more:
            amount = "more" if more else "fewer"
            raise LockstepError(
                f"{self._where}: found {amount} bytes than its header says, expected an array of "
                f"shape {list(self.shape)} and type {self.dtype}"
            )
        self._next = stop
        return values


def _read_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether it is in Fortran order, and dtype of what NumPy wrote."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"found version {version} of the format, expected 1.0 or 2.0")
    return read(stream)


@contextmanager
def _open_npy(paths: list[Path]) -> Iterator[Mapping[str, Sliced]]:
    with ExitStack() as stack:
        arrays = {}
        for path in paths:
            with expecting(path, *A_FILE_OF_ARRAYS):
                file = stack.enter_context(open(path, "rb"))
                array = arrays[path.stem] = _Streamed(file, str(path))
                size = os.fstat(file.fileno()).st_size - file.tell()
            _check_size(array, size, str(path))
        yield arrays


@contextmanager
def _open_npz(path: Path) -> Iterator[Mapping[str, Sliced]]:
    with ExitStack() as stack:
        with expecting(path, *A_FILE_OF_ARRAYS):
            archive = stack.enter_context(zipfile.ZipFile(path))
        members, arrays = archive.infolist(), {}
        if len(members) > MOST_ARRAYS:
            raise LockstepError(
                f"{path}: found {len(members)} arrays, expected at most {MOST_ARRAYS}"
            )
        for member in members:
            name, where = member.filename.removesuffix(".npy"), f"{path}: {brief(member.filename)}"
            if name in arrays or name == member.filename:
                raise LockstepError(f"{where}: expected a name that ends in .npy, and none twice")
            with expecting(where, *A_FILE_OF_ARRAYS):
                stream = stack.enter_context(archive.open(member))
                array = arrays[name] = _Streamed(stream, where)
                size = member.file_size - stream.tell()
            _check_size(array, size, where)
        yield arrays


def _check_size(array: _Streamed, size: int, where: str) -> None:
    expected = array.dtype.itemsize * math.prod(array.shape)
    if size != expected:
        raise LockstepError(
            f"{where}: found {size} bytes after its header, expected {expected} as it says"
        )


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Mapping[str, Sliced]]:
    yield dict(TensorFile(path))  # mapped, each array once


PROVIDER = Provider(survey, fetch, source_sha256)
