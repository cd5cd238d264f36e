"""Token shards on disk, and the sequences in them: `take` is a pure function of its indices.

A `.ds` file is Psyche's and datatrove's format: tokens as little-endian unsigned integers of 2 or 4
bytes, and nothing else. `shards.json` beside them lists the files of each split in their order.

A file of T tokens holds floor(T / L) sequences of L tokens. Psyche counts ceil((T - L) / L), which
is one less where L divides T: nothing is dropped here that Psyche keeps, and a file that divides
evenly keeps its last sequence. What remains after the last whole sequence of a file is read by
neither.

Shapes: N sequences, L tokens of each.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, JsonValue, ValidationError

from pipeline.artifacts import sha256_file, write_json
from pipeline.errors import LockstepError
from pipeline.locations import AnyShuffle, Shuffle, ShuffleSeeded
from pipeline.permutation import permute
from pipeline.table import Table

SHARDS = "shards.json"
OPEN_FILES = 512  # a mapped file holds a descriptor, and a process has about a thousand
SCAN_TOKENS = 2**22

Split = Literal["train", "held_out"]


class ShardFile(Table):
    """One token file: its path in the folder, its length in tokens, its SHA-256."""

    path: Annotated[str, Field(pattern=r"^(train|held_out)/[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
    split: Split
    tokens: Annotated[int, Field(gt=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shards(Table):
    """What `shards.json` says. Files of a split are read in the order in which they stand."""

    format: Literal[1]
    token_size_in_bytes: Literal[2, 4]
    vocab_size: Annotated[int, Field(gt=0)] | None
    shuffle: AnyShuffle
    files: tuple[ShardFile, ...]
    source: dict[str, JsonValue]

    def split(self, split: Split) -> tuple[ShardFile, ...]:
        """The files of one split, in order."""
        return tuple(file for file in self.files if file.split == split)


def read_shards(folder: Path) -> Shards:
    """Reads `shards.json`, and checks the length of every file that it lists.

    Raises:
      LockstepError: it is missing or malformed, or a file is missing or of another length.
    """
    path = folder / SHARDS
    try:
        shards = Shards.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise LockstepError(f"{path}: not there, expected from the stage download") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise LockstepError(
            f"{path}: {key}: found {first['input']!r:.80}: {first['msg']}"
        ) from error
    for file in shards.files:
        expected = file.tokens * shards.token_size_in_bytes
        try:
            found = (folder / file.path).stat().st_size
        except FileNotFoundError as error:
            raise LockstepError(f"{folder / file.path}: not there, listed in {path}") from error
        if found != expected:
            raise LockstepError(
                f"{folder / file.path}: found {found} bytes, expected {expected} as {path} says"
            )
    return shards


def write_shards(
    folder: Path,
    token_size_in_bytes: int,
    vocab_size: int | None,
    shuffle: Shuffle,
    source: dict,
) -> Shards:
    """Writes `shards.json` for the token files that lie in `train/` and `held_out/`, by name.

    Args:
      folder: the shards folder.
      token_size_in_bytes: 2 or 4.
      vocab_size: every id is smaller, as the provider saw to; None where it is not known.
      shuffle: the order of the train split.
      source: what the tokens were made of, as JSON.

    Raises:
      LockstepError: a file is empty or of odd length.
    """
    files = []
    for split in ("train", "held_out"):
        paths = (folder / split).glob("*.ds")
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            tokens = count_tokens(path, token_size_in_bytes)
            name, sha256 = f"{split}/{path.name}", sha256_file(path)
            files.append(ShardFile(path=name, split=split, tokens=tokens, sha256=sha256))
    shards = Shards(
        format=1,
        token_size_in_bytes=token_size_in_bytes,
        vocab_size=vocab_size,
        shuffle=shuffle,
        files=tuple(files),
        source=source,
    )
    write_json(folder / SHARDS, shards.model_dump(mode="json"))
    return shards


def count_tokens(path: Path, token_size_in_bytes: int) -> int:
    """The length of a token file in tokens.

    Raises:
      LockstepError: it is empty, or its length is no multiple of the token size.
    """
    size = path.stat().st_size
    if size == 0:
        raise LockstepError(
            f"{path}: found 0 bytes, expected tokens of {token_size_in_bytes} bytes"
        )
    if size % token_size_in_bytes:
        raise LockstepError(
            f"{path}: found {size} bytes, expected a multiple of the token size, "
            f"{token_size_in_bytes} bytes"
        )
    return size // token_size_in_bytes


def map_tokens(path: Path, token_size_in_bytes: int) -> np.ndarray:
    """The tokens of a file, mapped into memory and read where they are touched."""
    return np.memmap(path, dtype=f"<u{token_size_in_bytes}", mode="r").view(np.ndarray)


def check_file_ids(path: Path, token_size_in_bytes: int, vocab_size: int | None) -> None:
    """Reads a whole token file and checks that each id lies below `vocab_size`.

    Raises:
      LockstepError: the first id that does not, with its offset in tokens.
    """
    tokens_T, limit = map_tokens(path, token_size_in_bytes), _limit(vocab_size)
    for start in range(0, len(tokens_T), SCAN_TOKENS):
        tokens_t = tokens_T[start : start + SCAN_TOKENS]
        if int(tokens_t.max()) >= limit:
            first = int(np.argmax(tokens_t >= limit))
            raise _id_error(path, tokens_t[first], start + first, limit)


def check_ids(folder: Path, vocab_size: int) -> None:
    """Reads every token of a shards folder once: `check_file_ids` of each file.

    Raises:
      LockstepError: a token id is `vocab_size` or larger; names the file and the offset.
    """
    shards = read_shards(folder)
    for file in shards.files:
        check_file_ids(folder / file.path, shards.token_size_in_bytes, vocab_size)


def open_shards(folder: Path, split: Split, max_seq_len: int) -> "Sequences":
    """The sequences of one split; a split without files has none.

    Raises:
      LockstepError: as `read_shards`; or every file of the split is shorter than `max_seq_len`.
    """
    return Sequences(folder, read_shards(folder), split, max_seq_len)


class Sequences:
    """The sequences of one split, from files that are mapped when first touched.

    Args:
      folder: the shards folder.
      shards: what its `shards.json` says.
      split: "train" is read in the order that `shards.shuffle` names, "held_out" in file order.
      max_seq_len: L, the tokens in a sequence.
    """

    def __init__(self, folder: Path, shards: Shards, split: Split, max_seq_len: int):
        self.folder, self.split, self.max_seq_len = folder, split, max_seq_len
        self.files = shards.split(split)
        self._limit = _limit(shards.vocab_size)
        shuffled = split == "train" and isinstance(shards.shuffle, ShuffleSeeded)
        self._seed = bytes(shards.shuffle.seed) if shuffled else None
        # The first sequence of each file, and one past the last of all.
        counts_F = [file.tokens // max_seq_len for file in self.files]
        self._starts_F = np.cumsum([0, *counts_F], dtype=np.int64)
        if self.files and not len(self):
            longest = max(self.files, key=lambda file: file.tokens)
            raise LockstepError(
                f"max_seq_len = {max_seq_len}: expected a {split} shard at least as long, found "
                f"{longest.tokens} tokens in the longest, {folder / longest.path}"
            )
        # No reference to self, so that files close with the last use and not at a collection.
        paths, size = [folder / file.path for file in self.files], shards.token_size_in_bytes
        self._map = lru_cache(maxsize=OPEN_FILES)(lambda number: map_tokens(paths[number], size))

    def __len__(self) -> int:
        return int(self._starts_F[-1])

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """The sequences at these positions of the split's order.

        Position p is sequence `permute(seed, p, len(self))` of the files where the train split is
        shuffled, and sequence p where it is not.

        Args:
          indices_N: integers in 0..len(self)-1, repeated or not, in any order.

        Returns:
          int32 [N, L].

        Raises:
          LockstepError: an index lies outside, or a token read lies outside the vocabulary.
        """
        indices_N = np.asarray(indices_N, dtype=np.int64)
        self._check_range(indices_N)
        if self._seed is not None:
            indices_N = permute(self._seed, indices_N, len(self))
        file_N = np.searchsorted(self._starts_F, indices_N, side="right") - 1
        out_NL = np.empty((len(indices_N), self.max_seq_len), np.int32)

        # One gather for each file touched: positions in file order, cut where the file changes.
        order_N = np.argsort(file_N, kind="stable")
        cuts = np.flatnonzero(np.diff(file_N[order_N])) + 1
        for rows in np.split(order_N, cuts) if len(order_N) else ():
            out_NL[rows] = self._read(int(file_N[rows[0]]), indices_N[rows])
        return out_NL

    def _check_range(self, indices_N: np.ndarray) -> None:
        outside = indices_N[(indices_N < 0) | (indices_N >= len(self))]
        if outside.size:
            raise LockstepError(
                f"{self.folder}: sequence {outside[0]} asked for, expected one of the "
                f"{len(self)} {self.split} sequences of {self.max_seq_len} tokens, from 0"
            )

    def _read(self, number: int, sequences_n: np.ndarray) -> np.ndarray:
        L = self.max_seq_len
        tokens_T = self._map(number)
        within_n = sequences_n - self._starts_F[number]
        found_nL = tokens_T[: len(tokens_T) // L * L].reshape(-1, L)[within_n]
        beyond_nL = found_nL >= self._limit
        if beyond_nL.any():
            row, column = np.argwhere(beyond_nL)[0]
            offset = int(within_n[row]) * L + int(column)
            path = self.folder / self.files[number].path
            raise _id_error(path, found_nL[row, column], offset, self._limit)
        return found_nL


def _limit(vocab_size: int | None) -> int:
    # Without a vocabulary, still no id that int32 cannot hold: it would come out negative.
    return 2**31 if vocab_size is None else vocab_size


def _id_error(path: Path, token: np.integer, offset: int, limit: int) -> LockstepError:
    return LockstepError(
        f"{path}: found token id {token} at token {offset}, expected ids below {limit}"
    )
