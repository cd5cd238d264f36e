"""The sequences in token shards: `take` is a pure function of its indices.

A file of T tokens holds floor(T / L) sequences of L tokens. Psyche counts ceil((T - L) / L), which
is one less where L divides T: nothing is dropped here that Psyche keeps, and a file that divides
evenly keeps its last sequence. What remains after the last whole sequence of a file is read by
neither. In data of C columns, a sequence is a row of C * L numbers.

Shapes: N sequences, L tokens of each, W = C * L numbers of a row, F files, P parts, B positions of
a block.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import LockstepError
from lockstep.programs.columns import PLAIN
from lockstep.programs.permutation import permute
from pipeline.runfile import Network
from pipeline.runfile.data import Shuffle, ShuffleSeeded
from pipeline.tokens import mixture
from pipeline.tokens.files import TokenFiles
from pipeline.tokens.ids import Ids, limit_of
from pipeline.tokens.shards import SHARDS, Part, Shards, Split

BLOCK_POSITIONS = 2048  # positions that are located at once
NEAR_SPANS = 64  # spans, of the length of one, between two spans of the same round
CACHES_AHEAD = 4  # expected rows take at most 1 / 4 of the cache
DEFAULT_NETWORK = Network()


class Sequences:
    """The sequences of one split, from files that are opened when first touched.

    The split "train" is read in the order of `shards.shuffle`, "held_out" in file order, in as many
    passes. `max_seq_len` is L, `network` has time limits and memory for remote files, and
    `vocab_size` bounds the ids, beside that of `shards`. Words of rows that are not tokens have no
    bound.

    Raises:
      LockstepError: every file of the split is shorter than a sequence, a part with a weight has no
        sequence, or too many are mixed.
    """

    def __init__(
        self,
        folder: Path,
        shards: Shards,
        split: Split,
        max_seq_len: int,
        network: Network = DEFAULT_NETWORK,
        vocab_size: int | None = None,
        passes: int = 1,
    ):
        self.folder, self.split, self.max_seq_len = folder, split, max_seq_len
        self.passes = passes
        ids = Ids(limit_of(shards.vocab_size, vocab_size), shards.columns)
        self._ids = ids if shards.rows is None else None
        self._number_bytes = shards.token_size_in_bytes
        self._width = len(shards.columns) * max_seq_len
        self._row_bytes = self._number_bytes * self._width

        # Files of a part follow one another. `_starts_F` is the first sequence of each file, and
        # one past the last of all.
        parts = shards.parts if split == "train" else ()
        self.files = shards.split(split)
        if parts:
            self.files = tuple(sorted(self.files, key=lambda file: file.part))
        counts_F = [file.tokens // self._width for file in self.files]
        self._starts_F = np.cumsum([0, *counts_F], dtype=np.int64)
        self.count = int(self._starts_F[-1])
        if self.files and not self.count:
            longest = max(self.files, key=lambda file: file.tokens)
            row = "" if shards.columns == PLAIN else f", in {len(shards.columns)} columns"
            raise LockstepError(
                f"max_seq_len = {max_seq_len}: expected a {split} shard at least as long{row}, "
                f"found {longest.tokens} tokens in the longest, {longest.label(folder)}"
            )
        self._seed = _seed(shards.shuffle) if split == "train" else None
        self._mixed = self._mix(parts) if parts else None
        self._in_order = self._seed is None and self._mixed is None

        empty = np.empty(0, np.int64)
        self._block = _Block(0, empty, empty)
        self._token_files = TokenFiles(folder, self.files, self._row_bytes, network)
        self._most_ahead = max(1, network.cache_bytes // CACHES_AHEAD // self._row_bytes)
        # The stretch of positions read lately, and the end of those expected next.
        self._first, self._next, self._expected = 0, 0, 0

    @property
    def borders(self) -> list[int]:
        """The number of sequences before each file, in the files' order."""
        return self._starts_F[:-1].tolist()

    def __len__(self) -> int:
        """Return the number of positions: those of `count` sequences in each pass."""
        return self.passes * self.count

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """Return the sequences at these positions of the split's order.

        Position p is index p mod `count` of pass floor(p / count). In a shuffled train split,
        index i is sequence `permute(seed of the pass, i, count)`. If the split has parts,
        `mixture.place` gives the part at that index and how many of its sequences come before,
        modulo the part's size: the index in the part, in its own shuffled order if it has one.
        Without parts, sequences are counted over the files, one file after the other.

        Positions may be in any order, and may repeat. Return int32 [N, W], the columns of a row one
        after the other.

        Raises:
          LockstepError: a position is out of range, a token is outside the vocabulary, or a file
            cannot be read.
        """
        indices_N = np.asarray(indices_N, dtype=np.int64)
        if not len(indices_N):
            return np.empty((0, self._width), np.int32)
        file_N, start_N = self._locate(indices_N)
        rows_NW = np.empty((len(indices_N), self._width), f"<u{self._number_bytes}")
        self._token_files.read(file_N, start_N, rows_NW, self._in_order)
        if self._token_files.has_streams and self.split == "train":
            self._expect(int(indices_N.min()), int(indices_N.max()), len(indices_N))
        if self._ids and (invalid := self._ids.first_invalid(rows_NW)):
            where = self.files[file_N[invalid.row]].label(self.folder)
            offset = int(start_N[invalid.row]) // self._number_bytes + invalid.index
            raise invalid.error(where, rows_NW[invalid.row, invalid.index], offset)
        if self._number_bytes == 2:
            return rows_NW.astype(np.int32)
        # The same bits; labels of -100 are stored as 2**32 - 100.
        return rows_NW.view("<i4").astype(np.int32, copy=False)

    # ---- Positions ----

    def _locate(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_find` does, of a whole block at once: neighbours are read soon."""
        block = self._block
        within_N = indices_N - block.first
        # Viewed as uint64 a negative offset is huge, so one comparison covers both ends.
        if np.maximum.reduce(within_N.view(np.uint64)) >= len(block.files):
            low, high = int(indices_N.min()), int(indices_N.max())
            if low < 0 or high >= len(self):
                index = low if low < 0 else high
                passes = f" in {self.passes} passes" if self.passes > 1 else ""
                raise LockstepError(
                    f"{self.folder}: sequence {index}, expected one of the {len(self)} "
                    f"{self.split} sequences of {self.max_seq_len} tokens{passes}, from 0"
                )
            first = low // BLOCK_POSITIONS * BLOCK_POSITIONS
            if high >= first + BLOCK_POSITIONS:
                return self._find(indices_N)
            places = self._find(np.arange(first, min(first + BLOCK_POSITIONS, len(self))))
            block = self._block = _Block(first, *places)
            within_N = indices_N - first
        return block.files[within_N], block.starts[within_N]

    def _find(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each position's sequence, and where it is there, in bytes."""
        pass_N, sequence_N = np.divmod(indices_N, max(1, self.count))
        for number in np.unique(pass_N).tolist():
            of_pass = pass_N == number
            sequence_N[of_pass] = self._sequences(sequence_N[of_pass], number)
        file_N = np.searchsorted(self._starts_F, sequence_N, side="right") - 1
        return file_N, (sequence_N - self._starts_F[file_N]) * self._row_bytes

    def _sequences(self, indices_N: np.ndarray, number: int) -> np.ndarray:
        """Return the sequence at each index of a pass, counted over all files."""
        if self._seed is not None:
            indices_N = permute(_seed_of_pass(self._seed, number), indices_N, self.count)
        if self._mixed is not None:
            indices_N = self._mixed.sequences(indices_N, number)
        return indices_N

    def _mix(self, parts: tuple[Part, ...]) -> "_Mixed":
        part_F = [file.part for file in self.files]
        starts_P = self._starts_F[np.searchsorted(part_F, np.arange(len(parts)))]
        sizes_P = np.diff(starts_P, append=self.count)
        for number, part in enumerate(parts):
            if part.weight is not None and not sizes_P[number]:
                raise LockstepError(
                    f"{self.folder / SHARDS}: parts.{number}: no sequence of "
                    f"{self.max_seq_len} tokens, expected some for its weight, {part.weight}"
                )
        if self.count > mixture.MOST_INDICES:
            raise LockstepError(
                f"{self.folder / SHARDS}: {self.count} sequences in {len(parts)} parts, expected "
                f"at most {mixture.MOST_INDICES}, as many as can be mixed"
            )
        counts_P = mixture.counts([part.weight for part in parts], sizes_P.tolist())
        return _Mixed(counts_P, starts_P, sizes_P, [_seed(part.shuffle) for part in parts])

    # ---- Reading ahead ----

    def _expect(self, low: int, high: int, count: int) -> None:
        """Fetch the sequences ahead that are likely to be read next.

        In each round peers read spans of its positions, in any order, and the next round's follow.
        So positions read near a stretch belong to it, and after it as many are expected as it has,
        or twice as many as were just read: soon a whole round, and never much more than was read.
        """
        near = NEAR_SPANS * count
        if high < self._first - near or low > self._expected + near:
            self._first, self._next, self._expected = low, high + 1, high + 1
        self._first, self._next = min(self._first, low), max(self._next, high + 1)
        ahead = min(max(2 * count, self._next - self._first), self._most_ahead)
        start = max(self._next, self._expected)
        stop = min(self._next + ahead, len(self))
        if start < stop:
            self._expected = stop
            self._token_files.expect(*self._find(np.arange(start, stop)))


class _Block(NamedTuple):
    """The files and offsets of consecutive sequences' positions, from `first` on."""

    first: int
    files: np.ndarray
    starts: np.ndarray


class _Mixed(NamedTuple):
    """Parts, each a stretch of the files, mixed by `mixture`: one number or seed for each part."""

    counts: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    seeds: list[bytes | None]

    def sequences(self, indices_N: np.ndarray, number: int) -> np.ndarray:
        """Return the sequence at each index of a pass of the mixture, counted over all files."""
        part_N, drawn_N = mixture.place(self.counts, indices_N)
        sequence_N = drawn_N % self.sizes[part_N]
        for part, seed in enumerate(self.seeds):
            of_part = np.flatnonzero(part_N == part) if seed is not None else ()
            if len(of_part):
                seed, size = _seed_of_pass(seed, number), int(self.sizes[part])
                sequence_N[of_part] = permute(seed, sequence_N[of_part], size)
        return self.starts[part_N] + sequence_N


def _seed(shuffle: Shuffle) -> bytes | None:
    return bytes(shuffle.seed) if isinstance(shuffle, ShuffleSeeded) else None


def _seed_of_pass(seed: bytes, number: int) -> bytes:
    """Return the seed of a pass, from 0: the run's own, then SHA-256(seed | pass), a u32."""
    return hashlib.sha256(seed + number.to_bytes(4, "little")).digest() if number else seed
