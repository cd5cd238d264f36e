"""Rows that are not tokens, written as shards, and which of them are held out.

Where a percentage is, the held-out rows are spread evenly over all rows, by their number alone:
row i is held out if floor((i + 1) p / 100) > floor(i p / 100). A limit takes the first of the rows
that there are without it; then about HELD_OUT_TOKENS words are held out at most.

Shapes: N rows, n some of them, W words of 4 bytes in each.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError
from pipeline.runfile.data import Limit
from pipeline.sources.provider import HELD_OUT, TRAIN, FetchOptions
from pipeline.sources.token_files.choice import max_tokens
from pipeline.tokens.shards import ShardFile, Split, write_shard

SHARD_WORDS = 2**22  # about, of a file
Most = dict[Split, int | None]  # rows of each split; None is all


class RowShards:
    """The shards, as they are made of a few rows after another.

    Args:
      folder: an empty folder.
      words: W.
      most: rows of each split to keep, the first; the others are dropped.
    """

    def __init__(self, folder: Path, words: int, most: Most):
        self._folder, self._most = folder, dict(most)
        self._per_shard = max(1, SHARD_WORDS // words)
        self._waiting: dict[Split, list[np.ndarray]] = {TRAIN: [], HELD_OUT: []}
        self._files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
        self.rows: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}  # so far

    def add(self, split: Split, rows_NW: np.ndarray) -> None:
        """Add little-endian rows to a split."""
        if (most := self._most[split]) is not None:
            rows_NW = rows_NW[: most - self.rows[split]]
        if not len(rows_NW):
            return
        self.rows[split] += len(rows_NW)
        self._waiting[split].append(rows_NW)
        if sum(map(len, self._waiting[split])) >= self._per_shard:
            self._write(split)

    def is_full(self, splits: Iterable[Split] = (TRAIN, HELD_OUT)) -> bool:
        """Return whether more rows of these splits would be dropped."""
        return all(self.rows[split] == self._most[split] for split in splits)

    def done(self) -> tuple[ShardFile, ...]:
        """Write what is left; return all files."""
        for split, waiting in self._waiting.items():
            if waiting:
                self._write(split)
        return tuple(file for files in self._files.values() for file in files)

    def _write(self, split: Split) -> None:
        numbers, files = np.concatenate(self._waiting[split]), self._files[split]
        self._waiting[split] = []
        files.append(write_shard(self._folder, split, len(files), numbers))


# ---- Which rows ----


def held_out_rows(first: int, count: int, percent: float) -> np.ndarray:
    """Return which of the rows from number `first` on are held out: bool [count]."""
    passed = np.floor(np.arange(first, first + count + 1) * percent / 100)
    return np.diff(passed) > 0


def counts_of(given: Mapping[Split, int], percent: float | None, where: str) -> dict[Split, int]:
    """Return how many rows each split has, without a limit.

    Args:
      given: rows of each split as they are given.
      percent: share of the train rows to hold out instead; None for none.
      where: the data location and its path, for errors.

    Raises:
      LockstepError: both say what is held out, or one of the splits has no row.
    """
    train, held_out = given.get(TRAIN, 0), given.get(HELD_OUT, 0)
    if percent is not None and held_out:
        raise LockstepError(
            f"{where}: found {held_out} rows that are given as held out and held_out_percent = "
            f"{percent}, expected one of the two"
        )
    if percent is not None:
        held_out = int(np.floor(np.float64(train) * percent / 100))
        if not 0 < held_out < train:
            raise LockstepError(
                f"{where}: held_out_percent = {percent} holds out {held_out} of {train} rows, "
                "expected one at least, and one to train on"
            )
        train -= held_out
    if not train:
        raise LockstepError(f"{where}: found no rows to train on, expected some")
    return {TRAIN: train, HELD_OUT: held_out}


def most_rows(limit: Limit | None, words: int, where: str) -> Most:
    """Return how many rows of W words a limit allows; one of files allows all.

    Raises:
      LockstepError: it is of sequences of another length, or allows no row.
    """
    if limit and limit.max_seq_len not in (None, words):
        raise LockstepError(
            f"download.limit.max_seq_len is {limit.max_seq_len}, expected {words}, the words of a "
            f"row of {where}"
        )
    most = {
        split: None if most is None else most // words for split, most in max_tokens(limit).items()
    }
    if most[TRAIN] == 0:
        raise LockstepError(
            f"download.limit.tokens is {limit.tokens}, expected at least {words}, the words of a "
            f"row of {where}"
        )
    if most[HELD_OUT] == 0:
        most[HELD_OUT] = 1
    return most


def warnings_of(counts: Mapping[Split, int], where: str, options: FetchOptions) -> tuple[str, ...]:
    """Return what a user should know of the splits."""
    if counts[HELD_OUT] or not options.measured:
        return ()
    return (f"{where}: neither held_out_percent nor held-out rows, so nothing is held out",)
