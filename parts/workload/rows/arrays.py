"""Arrays of examples, for a workload: of files of this machine, or of its own `dataset(split)`.

`data_location.Arrays` are .npy and safetensors, mapped, and read a slice of their first axis at a
time; no pickle is ever loaded. A folder of .npy files is an array of each; of safetensors files
each has all arrays, of some of the examples.

`data_location.Workload` asks the workload by `FetchOptions.dataset`: this room starts no process.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from lockstep.errors import LockstepError, expecting
from lockstep.files import check_regular_file, sha256_file
from lockstep.tables.variant import variant_name
from lockstep.transcript.tensorfile import TensorFile
from parts.workload.rows.writing import (
    Examples,
    counts_of,
    examples_of,
    most_rows,
    same_rows,
    warnings_of,
    write_arrays,
)
from parts.workload.tables import DataArrays, DataWorkload
from pipeline.net.errors import check_name
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
KINDS = (".npy", ".safetensors")


class ArrayData(NamedTuple):
    """Examples of each split; where they are, for people and errors; files by their names, if any.

    Files are named in the folder that they are in; a workload's own examples are in none.
    """

    read: str
    where: str
    files: dict[str, Path]
    splits: dict[Split, list[Examples]]


def survey(location: AnyArrays, options: FetchOptions) -> Survey:
    """Describe the arrays that a run would read; headers are read, and no values."""
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
    """Return the SHA-256 of the arrays' files, if `fetch` would read all of them."""
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
    rows, percent = same_rows(data.splits, data.where), location.held_out_percent
    with unchanged(data.files.values()):
        shards = write_arrays(folder, data.splits, data.where, percent, options)
        files, contents = shards.finish(), _contents(data)
    if not data.files:
        row = hashlib.sha256(rows.model_dump_json().encode()).hexdigest()
        contents = [("rows", row), *((file.path, file.sha256) for file in files)]
    return Fetched(
        files=files,
        token_size_in_bytes=WORD,
        vocab_size=None,
        shuffle=location.shuffle,
        rows=rows,
        source={
            "read": data.read,
            **({"files": list(data.files)} if data.files else {}),
            "rows": dict(shards.rows),
            "sha256": listing_sha256(contents),
        },
        warnings=warnings_of(shards.rows, data.where, options),
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
        split: [examples_of(f'{where}: dataset("{split}")', partial(dict, arrays[split]))]
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
        return paths, [examples_of(str(root), partial(_mapped_npy, paths))]
    return paths, [_read_file(path) for path in paths]


def _read_file(path: Path) -> Examples:
    """Return the arrays in one file."""
    check_regular_file(path)
    if path.suffix not in KINDS:
        unpacked = ", which `unzip` makes a folder of .npy files" * (path.suffix == ".npz")
        raise LockstepError(f"{path}: expected a file that ends in {' or '.join(KINDS)}{unpacked}")
    if path.suffix == ".npy":
        return examples_of(str(path), partial(_mapped_npy, [path]))
    return examples_of(str(path), lambda: dict(TensorFile(path)))  # maps each array once


def _mapped_npy(paths: list[Path]) -> dict[str, np.ndarray]:
    return {path.stem: _mapped(path) for path in paths}


def _mapped(path: Path) -> np.ndarray:
    """Return the array that NumPy wrote, mapped; of Python objects there is none."""
    with expecting(path, *A_FILE_OF_ARRAYS), np.errstate(over="ignore"):  # of a shape's product
        array = np.lib.format.open_memmap(path, mode="r")
        after = path.stat().st_size - array.offset
    if after != array.nbytes:
        raise LockstepError(
            f"{path}: found {after} bytes after its header, expected {array.nbytes} as it says"
        )
    return array


PROVIDER = Provider(survey, fetch, source_sha256)
