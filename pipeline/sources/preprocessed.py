"""`data_location.Preprocessed`: rows of token ids in parquet files (parquet.py), made into shards.

The split is the name of a file's folder, or the beginning of its own. The first of HELD_OUT_SPLITS
that there is is held out; without one the last file is, and where there is but one file nothing is:
a warning says so. A limit is on the train split; where it cuts by tokens or steps, at most
HELD_OUT_TOKENS are held out.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from pipeline.errors import LockstepError
from pipeline.net import store
from pipeline.net.remote import Origin
from pipeline.net.store import Transfer
from pipeline.runfile.data import DataPreprocessed, Limit, ShuffleDontShuffle
from pipeline.runfile.serde_enum import variant_name
from pipeline.sources import (
    HELD_OUT,
    HELD_OUT_TOKENS,
    TOKENIZER,
    TRAIN,
    Fetched,
    Survey,
    SurveyedFile,
    Wanted,
    hub,
    listed,
    refuse_stream,
)
from pipeline.sources.listed import Listed, Listing, label
from pipeline.sources.parquet import COLUMNS, Parquet
from pipeline.stage.artifacts import listing_sha256, write_bytes
from pipeline.tokens.shards import ShardFile, shard_path

HELD_OUT_SPLITS = ("validation", "val", "dev", "test")
SHARD_NUMBERS = 2**20
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


def survey(location: DataPreprocessed, wanted: Wanted) -> Survey:
    """What a run would read; of files of this machine, how many tokens that are.

    Raises:
      LockstepError: as `fetch`, but for what only reading a row tells.
    """
    listing, chosen = _choose(location, wanted)
    most = _most_tokens(wanted.limit)
    files = []
    for split, of_split in chosen.files.items():
        left = most[split]
        for file in of_split:
            here = file.origin.is_local
            tokens = Parquet(Path(file.origin.url), label(file)).tokens if here else None
            if here and left is not None:
                tokens = min(tokens, left)
                left -= tokens
            if tokens != 0:
                files.append(SurveyedFile(file.name, split, file.origin.size, tokens))
    return Survey(listing.read, tuple(files), chosen.train_files, chosen.warnings)


def fetch(location: DataPreprocessed, folder: Path, wanted: Wanted) -> Fetched:
    """Makes shards of parquet files, of a folder or of a dataset on the hub.

    Raises:
      LockstepError: there are none, pyarrow is not installed, or a row is not as it should be; the
        error names file, column and row.
    """
    refuse_stream(location, wanted)
    listing, chosen = _choose(location, wanted)
    vocab_size = listed.fetch_tokenizer(listing, folder, wanted)
    shards, warnings = _Shards(folder, vocab_size), list(chosen.warnings)
    read: dict[str, dict[str, str]] = {TRAIN: {}, HELD_OUT: {}}
    for split, of_split in chosen.files.items():
        (folder / split).mkdir()
        left = _most_tokens(wanted.limit)[split]
        # where only rows say how many files are needed, no more are fetched than at once
        some = len(of_split) if left is None else wanted.network.connections
        for file, kept in _fetch(of_split, some, wanted):
            rows = Parquet(kept.path, label(file))
            if not rows.rows:
                warnings.append(f"{label(file)}: has no rows")
            elif left is None:
                shards.add(rows, file.name, split, None)
            else:
                left -= shards.add(rows, file.name, split, left)
            read[split][file.name] = kept.sha256
            if left is not None and left < max(1, shards.length):
                break
    if not shards.rows[TRAIN]:
        raise LockstepError(f"{listing.read}: found no rows to train on, expected some")
    return Fetched(
        files=tuple(shards.files),
        token_size_in_bytes=4,
        vocab_size=vocab_size,
        shuffle=listing.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": {split: list(names) for split, names in read.items()},
            "rows": shards.rows,
            "row_tokens": shards.length,
            "sha256": listing_sha256(pair for names in read.values() for pair in names.items()),
        },
        columns=tuple(COLUMNS[column] for column in shards.columns),
        warnings=tuple(warnings),
    )


def _fetch(
    files: list[Listed], some: int, wanted: Wanted
) -> Iterator[tuple[Listed, store.Stored]]:
    """Files and where they are in the store, fetched some at a time as they are asked for."""
    for start in range(0, len(files), max(1, some)):
        lot = files[start : start + some]
        wishes = [Transfer(label(file), file.origin, file.origin.size) for file in lot]
        with wanted.progress(total=sum(wish.size for wish in wishes), unit="byte") as bar:
            kept = store.fetch(wishes, wanted.store, wanted.network, bar)
        yield from zip(lot, kept, strict=True)


class _Shards:
    """The shards, as they are made of one parquet file after another.

    Args:
      folder: where they go.
      vocab_size: of the tokenizer; None where there is none.

    Attributes:
      files: the shards; rows: how many of each split; columns, length: of the first file that has
        rows, and so of all.
    """

    def __init__(self, folder: Path, vocab_size: int | None):
        self.folder, self.vocab_size = folder, vocab_size
        self.files: list[ShardFile] = []
        self.rows = {TRAIN: 0, HELD_OUT: 0}
        self.columns: tuple[str, ...] = ()
        self.length = 0
        self._first = ""
        self._counts = {TRAIN: 0, HELD_OUT: 0}

    def add(self, file: Parquet, name: str, split: str, most: int | None) -> int:
        """Makes shards of a file's first `most` tokens, or of all; how many tokens that were.

        Raises:
          LockstepError: it has other columns than the first, or a row is wrong.
        """
        if not self.columns:
            self.columns, self.length, self._first = file.columns, file.length, file.name
        if file.columns != self.columns:
            found, expected = ", ".join(file.columns), ", ".join(self.columns)
            raise LockstepError(
                f"{file.name}: found columns {found}, expected {expected} as in {self._first}"
            )
        rows = None if most is None else most // self.length
        size = max(1, SHARD_NUMBERS // (len(self.columns) * self.length))
        done = 0
        for rows_NW in file.read(self.length, self.vocab_size, size, rows):
            last = done + len(rows_NW) - 1
            self._write(rows_NW, split, f"{name}, rows {done} to {last}")
            done = last + 1
        self.rows[split] += done
        return done * self.length

    def _write(self, rows_NW: np.ndarray, split: str, name: str) -> None:
        path = shard_path(Path(), split, self._counts[split])
        self._counts[split] += 1
        data = rows_NW.astype("<u4").tobytes()  # -100 as its 32 bits
        write_bytes(self.folder / path, data)
        sha256 = hashlib.sha256(data).hexdigest()
        self.files.append(
            ShardFile(
                path=path.as_posix(), split=split, tokens=rows_NW.size, sha256=sha256, name=name
            )
        )


# ---- Which files ----


class _Chosen(NamedTuple):
    """The files of each split that a run reads, how many there are to train on, and warnings."""

    files: dict[str, list[Listed]]
    train_files: int
    warnings: tuple[str, ...]


def _choose(location: DataPreprocessed, wanted: Wanted) -> tuple[Listing, _Chosen]:
    listing = _list(location, wanted)
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in .parquet")
    train, held_out, warnings = _splits(listing)
    if not train:
        raise LockstepError(
            f"{listing.read}: found no files of the split train, expected some beside "
            f"{listing.files[0].name}"
        )
    limit = wanted.limit
    first = train if limit is None or limit.files is None else train[: limit.files]
    return listing, _Chosen({TRAIN: first, HELD_OUT: held_out}, len(train), warnings)


def _list(location: DataPreprocessed, wanted: Wanted) -> Listing:
    """The parquet files of the folder or the dataset, and the tokenizer beside them, by name.

    Raises:
      LockstepError: there is neither.
    """
    root = Path(location.source).expanduser()
    if root.is_dir():
        return _listing(location.source, _local(root), {})
    repo_id, where = location.source.strip(), variant_name(location)
    if not REPO_ID.fullmatch(repo_id):
        raise LockstepError(
            f"{where}: found no folder {root.absolute()}, expected one of .parquet files, or "
            "owner/name of a dataset on the hub"
        )

    def ask() -> Listing:
        commit, files = hub.list_dataset(repo_id, None, f"{where}: {repo_id}", wanted.network)
        return _listing(f"{repo_id} on the hub", files, {"repo_id": repo_id, "commit": commit})

    return listed.remembered(wanted, location, ask)


def _listing(read: str, files: Iterable[Listed], says: dict[str, str]) -> Listing:
    files = sorted(files, key=lambda file: file.name)
    parquet = (file for file in files if file.name.endswith(".parquet"))
    return Listing(
        read=read,
        token_size_in_bytes="FourBytes",
        shuffle=ShuffleDontShuffle(),
        files=tuple(file for file in parquet if not _is_hidden(file.name)),
        tokenizer=listed.tokenizer_files(files),
        says=says,
    )


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _local(root: Path) -> Iterator[Listed]:
    """The parquet files of a folder and of those in it, and what may be a tokenizer's."""
    found = {*root.rglob("*.parquet"), *root.glob("*"), *(root / TOKENIZER).glob("*")}
    for path in found:
        if path.is_file():
            origin = Origin(url=str(path.absolute()), size=path.stat().st_size)
            yield Listed(name=path.relative_to(root).as_posix(), origin=origin)


def _splits(listing: Listing) -> tuple[list[Listed], list[Listed], tuple[str, ...]]:
    """The files to train on, those that are held out, and warnings of what the names do not say."""
    by_split: dict[str | None, list[Listed]] = {}
    for file in listing.files:
        by_split.setdefault(_split_of(file.name), []).append(file)
    train = by_split.pop(TRAIN if TRAIN in by_split else None, [])
    held_out, warnings = [], []
    for split in HELD_OUT_SPLITS:
        held_out = held_out or by_split.pop(split, [])
    where = f"{listing.read}: no files of {', '.join(HELD_OUT_SPLITS)}"
    if not held_out and len(train) > 1:
        *train, last = train
        held_out = [last]
        warnings.append(f"{where}, so the last file, {last.name}, is held out")
    elif not held_out:
        warnings.append(f"{where}, and one file, so nothing is held out")
    for split, files in by_split.items():
        said = f"of split {split}" if split else "that say no split"
        warnings.append(f"{listing.read}: {len(files)} files {said} are not used")
    return train, held_out, tuple(warnings)


def _split_of(name: str) -> str | None:
    """The split that the name of a file's folder, or its own, begins with; None for no split."""
    *folders, file = PurePosixPath(name.lower()).parts
    for said in (*folders[-1:], file):
        if (first := re.split("[-_.]", said)[0]) in (TRAIN, *HELD_OUT_SPLITS):
            return first
    return None


def _most_tokens(limit: Limit | None) -> dict[str, int | None]:
    """How many tokens of each split a limit allows; None: all of its files."""
    if limit is None or limit.files is not None:
        return {TRAIN: None, HELD_OUT: None}
    train = limit.tokens if limit.steps is None else limit.sequences * limit.max_seq_len
    return {TRAIN: train, HELD_OUT: HELD_OUT_TOKENS}
