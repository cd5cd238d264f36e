"""`data_location.Files`: files of any content in a folder of this machine, for a workload.

They are read in the order of their names, and copied, each under its SHA-256: a file of the folder
may be written to later. Files of equal content are as many rows, and one copy.
"""

import hashlib
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import LockstepError, expecting
from lockstep.files import sha256_file, writes
from lockstep.machine.progress import Progress
from parts.workload.rows.writing import RowShards, counts_of, held_out_rows, most_rows, warnings_of
from parts.workload.tables import DataFiles
from pipeline.net.errors import check_name
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
from pipeline.stage.untrusted_files import (
    FileStamp,
    check_file,
    check_unchanged,
    expand,
    stamp,
    walk,
)
from pipeline.tokens import signs
from pipeline.tokens.rows import FILES, WORD, FileRows
from pipeline.tokens.shards import Split

PATH = "model.LLM.data_location.Files"
PIECE = 2**20  # bytes


class OpaqueFile(NamedTuple):
    """A file that is a row: its name in the folder, where it is, and its stamp before."""

    name: str
    path: Path
    stamp: FileStamp


def survey(location: DataFiles, options: FetchOptions) -> Survey:
    """Describe the files that a run would copy."""
    splits, train_files = _choose(location, options)
    words = FileRows(folder=FILES).words
    files = tuple(
        SurveyedFile(file.name, split, file.stamp.size, words)
        for split, chosen in splits.items()
        for file in chosen
    )
    counts = {split: len(chosen) for split, chosen in splits.items()}
    warnings = warnings_of(counts, f"{PATH}: {location.path}", options)
    return Survey(location.path, files, train_files, warnings, row_words=words)


def source_sha256(location: DataFiles, options: FetchOptions) -> str | None:
    """Return the SHA-256 of all files, if `fetch` would copy each of them."""
    if options.limit is not None:
        return None
    files = _find(location)
    return listing_sha256((file.name, sha256_file(file.path)) for file in files)


def fetch(location: DataFiles, folder: Path, options: FetchOptions) -> Fetched:
    """Copy the files, and make shards of their hashes.

    Raises:
      LockstepError: no file is there, one is not a regular file, is a link out of the folder or
        changes meanwhile, or a split has no file.
    """
    splits, _ = _choose(location, options)
    rows = FileRows(folder=FILES)
    shards = RowShards(folder, rows.words, {TRAIN: None, HELD_OUT: None})
    contents: list[tuple[str, str]] = []
    size = sum(file.stamp.size for chosen in splits.values() for file in chosen)
    (folder / FILES).mkdir()
    with options.progress(total=size, unit="byte") as bar:
        for split, chosen in splits.items():
            hashes = [_copy(file, folder / FILES, bar) for file in chosen]
            contents += [(file.name, sha256) for file, sha256 in zip(chosen, hashes, strict=True)]
            digests = np.frombuffer(bytes.fromhex("".join(hashes)), "<u4")
            shards.add(split, digests.reshape(-1, rows.words))
    counts = dict(shards.rows)
    return Fetched(
        files=shards.finish(),
        token_size_in_bytes=WORD,
        vocab_size=None,
        shuffle=location.shuffle,
        rows=rows,
        source={
            "read": location.path,
            "rows": counts,
            "bytes": size,
            "sha256": listing_sha256(contents),
        },
        warnings=(*warnings_of(counts, f"{PATH}: {location.path}", options), *_same(contents)),
    )


def _choose(
    location: DataFiles, options: FetchOptions
) -> tuple[dict[Split, list[OpaqueFile]], int]:
    """Return the files whose rows a run reads, by split, and the number of all train files."""
    files, where, percent = _find(location), f"{PATH}: {location.path}", location.held_out_percent
    named = signs.held_out_beside(file.name for file in files)
    named |= {file.name for file in files if file.name.startswith(f"{HELD_OUT}/")}
    held_out = [file for file in files if file.name in named]
    train = [file for file in files if file.name not in named]
    counts_of({TRAIN: len(train), HELD_OUT: len(held_out)}, percent, where)
    if percent is not None:
        held_out_N = held_out_rows(0, len(train), percent).tolist()
        held_out = [file for file, held in zip(train, held_out_N, strict=True) if held]
        train = [file for file, held in zip(train, held_out_N, strict=True) if not held]
    most = most_rows(options.limit, FileRows(folder=FILES).words, where)
    if options.limit and options.limit.files:
        most[TRAIN] = options.limit.files
    return {TRAIN: train[: most[TRAIN]], HELD_OUT: held_out[: most[HELD_OUT]]}, len(train)


def _find(location: DataFiles) -> Sequence[OpaqueFile]:
    root = expand(location.path, PATH)
    if not root.is_dir():
        raise LockstepError(f"{PATH}: found no folder {root.absolute()}, expected one")
    files = []
    for name, path in walk(root, hidden=False):
        if fnmatchcase(name.removeprefix(f"{HELD_OUT}/"), location.pattern):
            check_name(name, str(root))
            check_file(path, root)
            files.append(OpaqueFile(name, path, stamp(path)))
    if not files:
        raise LockstepError(
            f"{PATH}: {root.absolute()} has no file like {location.pattern}, expected some"
        )
    return sorted(files)


def _copy(file: OpaqueFile, folder: Path, bar: Progress) -> str:
    """Copy a file that is a row under its hash, which is returned."""
    temp, digest = folder / ".part", hashlib.sha256()
    with expecting(file.path, "a readable file"):
        source = open(file.path, "rb")  # noqa: SIM115 - closed below
    with source, writes(temp), open(temp, "wb") as target:
        while piece := source.read(PIECE):
            digest.update(piece)
            target.write(piece)
            bar.advance(len(piece))
    check_unchanged(file.path, file.stamp)
    with writes(folder / digest.hexdigest()):
        os.replace(temp, folder / digest.hexdigest())
    return digest.hexdigest()


def _same(contents: list[tuple[str, str]]) -> list[str]:
    first: dict[str, str] = {}
    for name, sha256 in contents:
        if first.setdefault(sha256, name) != name:
            count = len(contents) - len({digest for _, digest in contents})
            return [f"{count} files have the content of another, as {name} that of {first[sha256]}"]
    return []


PROVIDER = Provider(survey, fetch, source_sha256)
