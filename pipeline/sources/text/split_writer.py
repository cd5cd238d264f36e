"""The writer of a split's tokens as shards.

Shapes: T tokens of a piece, S of a shard.
"""

from pathlib import Path

import numpy as np

from pipeline.tokens.shards import ShardFile, Split, write_shard

SHARD_TOKENS = 2**20


class SplitWriter:
    """Writes tokens of a split as shards of SHARD_TOKENS, the last one shorter.

    At most `most` tokens are written, None for all that come. `files` gains the shards; those that
    other writers put there count in names. `part` is that of the sources that are mixed.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        token_size_in_bytes: int,
        most: int | None,
        files: list[ShardFile],
        part: int,
    ):
        self._folder, self._split, self._left = folder, split, most
        self._shard_S, self._filled = np.empty(SHARD_TOKENS, f"<u{token_size_in_bytes}"), 0
        self._files, self._part, self.has_written = files, part, False

    @property
    def is_full(self) -> bool:
        """Whether no further token of the split would be written."""
        return self._left == 0

    def add(self, tokens_T: np.ndarray) -> None:
        """Write tokens of the split, as far as there is room."""
        if self._left is not None:
            tokens_T = tokens_T[: self._left]
            self._left -= len(tokens_T)
        while len(tokens_T):
            part_t = tokens_T[: SHARD_TOKENS - self._filled]
            self._shard_S[self._filled : self._filled + len(part_t)] = part_t
            tokens_T, self._filled = tokens_T[len(part_t) :], self._filled + len(part_t)
            if self._filled == SHARD_TOKENS:
                self._write()

    def close(self) -> None:
        """Write the last shard of the split."""
        if self._filled:
            self._write()

    def _write(self) -> None:
        shard_S = self._shard_S[: self._filled]
        file = write_shard(self._folder, self._split, len(self._files), shard_S)
        self._files.append(file.model_copy(update={"part": self._part}))
        self.has_written = True
        self._filled = 0
