"""The sequences in token shards: `take` is a pure function of its indices.

A file of T tokens holds floor(T / L) sequences of L tokens. Psyche counts ceil((T - L) / L), which
is one less where L divides T: nothing is dropped here that Psyche keeps, and a file that divides
evenly keeps its last sequence. What remains after the last whole sequence of a file is read by
neither. Where data has C columns, a sequence is a row of C * L numbers.

Shapes: N sequences, L tokens of each, W = C * L numbers of a row, F files, P parts, B positions of
a block.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import LockstepError
from pipeline.runfile.data import Shuffle, ShuffleSeeded
from pipeline.runfile.network import Network
from pipeline.tokens import mixture
from pipeline.tokens.files import TokenFiles
from pipeline.tokens.ids import Ids, limit_of
from pipeline.tokens.permutation import permute
from pipeline.tokens.shards import PLAIN, SHARDS, Part, Shards, Split, read_shards

BLOCK = 2048  # positions whose places are found at once
NEAR = 64  # spans, of the length of one, between two that are asked for in the same round
CACHES_AHEAD = 4  # what is expected fills at most one in so many parts of the cache
DEFAULT_NETWORK = Network()


def open_shards(
    folder: Path,
    split: Split,
    max_seq_len: int,
    network: Network = DEFAULT_NETWORK,
    vocab_size: int | None = None,
) -> "Sequences":
    """The sequences of one split; a split without files has none.

    Raises:
      LockstepError: as `read_shards` and `Sequences`.
    """
    return Sequences(folder, read_shards(folder), split, max_seq_len, network, vocab_size)


class Sequences:
    """The sequences of one split, from files that are opened when first touched.

    Args:
      folder: the shards folder.
      shards: what its `shards.json` says.
      split: "train" is read in the order that `shards` says, "held_out" in file order.
      max_seq_len: L, the tokens in a sequence.
      network: how files are read that lie elsewhere.
      vocab_size: every id is to be below it too; None: only below that of `shards`.

    Raises:
      LockstepError: every file of the split is shorter than a sequence, a part with a weight has no
        sequence, or more are mixed than can be.
    """

    def __init__(
        self,
        folder: Path,
        shards: Shards,
        split: Split,
        max_seq_len: int,
        network: Network = DEFAULT_NETWORK,
        vocab_size: int | None = None,
    ):
        self.folder, self.split, self.max_seq_len = folder, split, max_seq_len
        self._ids = Ids(limit_of(shards.vocab_size, vocab_size), shards.columns)
        self._number_bytes = shards.token_size_in_bytes
        self._width = len(shards.columns) * max_seq_len
        self._row_bytes = self._number_bytes * self._width

        # The files of a part stand one after the other; the first sequence of each file, of each
        # part, and one past the last of all.
        parts = shards.parts if split == "train" else ()
        self.files = shards.split(split)
        if parts:
            self.files = tuple(sorted(self.files, key=lambda file: file.part))
        counts_F = [file.tokens // self._width for file in self.files]
        self._starts_F = np.cumsum([0, *counts_F], dtype=np.int64)
        if self.files and not len(self):
            longest = max(self.files, key=lambda file: file.tokens)
            row = "" if shards.columns == PLAIN else f", in {len(shards.columns)} columns"
            raise LockstepError(
                f"max_seq_len = {max_seq_len}: expected a {split} shard at least as long{row}, "
                f"found {longest.tokens} tokens in the longest, {longest.label(folder)}"
            )
        self._seed = _seed(shards.shuffle) if split == "train" else None
        self._mixed = self._mix(parts) if parts else None
        self._in_order = self._seed is None and self._mixed is None

        nowhere = np.empty(0, np.int64)
        self._block = _Block(0, nowhere, nowhere)
        self._token_files = TokenFiles(folder, self.files, self._row_bytes, network)
        self._most_ahead = max(1, network.cache_bytes // CACHES_AHEAD // self._row_bytes)
        # The stretch of positions that were asked for, and where those end that are expected next.
        self._first, self._next, self._expected = 0, 0, 0

    def __len__(self) -> int:
        return int(self._starts_F[-1])

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """The sequences at these positions of the split's order.

        Where the train split is shuffled, position p stands for `permute(seed, p, len(self))`.
        Where it has parts, `mixture.place` says which part stands there, and how many of it come
        before: so many, counted from 0 again after its last, is the sequence of the part, in the
        part's own shuffled order where it has one. Without parts it is that of the files, one file
        after the other.

        Args:
          indices_N: integers in 0..len(self)-1, repeated or not, in any order.

        Returns:
          int32 [N, W], the columns of a row one after the other.

        Raises:
          LockstepError: an index lies outside, a token read lies outside the vocabulary, or a file
            cannot be read.
        """
        indices_N = np.asarray(indices_N, dtype=np.int64)
        if not len(indices_N):
            return np.empty((0, self._width), np.int32)
        file_N, start_N = self._places(indices_N)
        rows_NW = np.empty((len(indices_N), self._width), f"<u{self._number_bytes}")
        self._token_files.read(file_N, start_N, rows_NW, self._in_order)
        if self._token_files.has_streams and self.split == "train":
            self._expect(int(indices_N.min()), int(indices_N.max()), len(indices_N))
        if beyond := self._ids.beyond(rows_NW):
            where = self.files[file_N[beyond.row]].label(self.folder)
            offset = int(start_N[beyond.row]) // self._number_bytes + beyond.place
            raise beyond.error(where, rows_NW[beyond.row, beyond.place], offset)
        if self._number_bytes == 2:
            return rows_NW.astype(np.int32)
        # The same bits, also those of labels of -100, which are stored as 2**32 - 100.
        return rows_NW.view("<i4").astype(np.int32, copy=False)

    # ---- Where a position is ----

    def _places(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `_find`, of a whole block at once: the positions beside these are asked for soon."""
        block = self._block
        within_N = indices_N - block.first
        # Seen without signs, what lies before the block lies far beyond it.
        if np.maximum.reduce(within_N.view(np.uint64)) >= len(block.file_B):
            low, high = int(indices_N.min()), int(indices_N.max())
            if low < 0 or high >= len(self):
                raise self._no_such(low if low < 0 else high)
            first = low // BLOCK * BLOCK
            if high >= first + BLOCK:
                return self._find(indices_N)
            places = self._find(np.arange(first, min(first + BLOCK, len(self))))
            block = self._block = _Block(first, *places)
            within_N = indices_N - first
        return block.file_B[within_N], block.start_B[within_N]

    def _no_such(self, index: int) -> LockstepError:
        return LockstepError(
            f"{self.folder}: sequence {index} asked for, expected one of the {len(self)} "
            f"{self.split} sequences of {self.max_seq_len} tokens, from 0"
        )

    def _find(self, indices_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file in which each position's row stands, and the byte there at which it begins."""
        if self._seed is not None:
            indices_N = permute(self._seed, indices_N, len(self))
        if self._mixed is not None:
            indices_N = self._mixed.sequences(indices_N)
        file_N = np.searchsorted(self._starts_F, indices_N, side="right") - 1
        return file_N, (indices_N - self._starts_F[file_N]) * self._row_bytes

    def _mix(self, parts: tuple[Part, ...]) -> "_Mixed":
        of_F = [file.part for file in self.files]
        starts_P = self._starts_F[np.searchsorted(of_F, np.arange(len(parts)))]
        sizes_P = np.diff(starts_P, append=len(self))
        for number, part in enumerate(parts):
            if part.weight is not None and not sizes_P[number]:
                raise LockstepError(
                    f"{self.folder / SHARDS}: parts.{number}: found no sequence of "
                    f"{self.max_seq_len} tokens, expected some for its weight, {part.weight}"
                )
        if len(self) > mixture.LARGEST:
            raise LockstepError(
                f"{self.folder / SHARDS}: found {len(self)} sequences in {len(parts)} parts, "
                f"expected at most {mixture.LARGEST}, as many as can be mixed"
            )
        counts_P = mixture.counts([part.weight for part in parts], sizes_P.tolist())
        return _Mixed(counts_P, starts_P, sizes_P, [_seed(part.shuffle) for part in parts])

    # ---- What is asked next ----

    def _expect(self, low: int, high: int, count: int) -> None:
        """Has the positions fetched that are likely asked next: those that follow.

        In each round peers ask for spans of its positions, one peer after the other but the spans
        in any order, and the next round's follow. So what is asked near a stretch of positions
        belongs to it, and after it as many are expected as it has, or twice as many as were just
        asked: soon a whole round, and never much more in all than was read.
        """
        near = NEAR * count
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
    """Where the rows of positions in a row are, from `first` on."""

    first: int
    file_B: np.ndarray
    start_B: np.ndarray


class _Mixed(NamedTuple):
    """Parts of which each has its place in the files, mixed as `mixture` says."""

    counts_P: np.ndarray
    starts_P: np.ndarray
    sizes_P: np.ndarray
    seeds_P: list[bytes | None]

    def sequences(self, indices_N: np.ndarray) -> np.ndarray:
        """The sequence that stands at each place, counted over all files."""
        part_N, drawn_N = mixture.place(self.counts_P, indices_N)
        found_N = drawn_N % self.sizes_P[part_N]
        for part, seed in enumerate(self.seeds_P):
            of_part = np.flatnonzero(part_N == part) if seed is not None else ()
            if len(of_part):
                found_N[of_part] = permute(seed, found_N[of_part], int(self.sizes_P[part]))
        return self.starts_P[part_N] + found_N


def _seed(shuffle: Shuffle) -> bytes | None:
    return bytes(shuffle.seed) if isinstance(shuffle, ShuffleSeeded) else None
