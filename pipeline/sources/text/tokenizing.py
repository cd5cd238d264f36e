"""Encodes the documents of one or several readers, and writes them as shards.

An end token follows each document and nothing precedes it, as in shards of datatrove.

Shapes: T tokens of a piece, S of a shard.
"""

import itertools
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from lockstep.errors import LockstepError
from pipeline.runfile.data import Limit
from pipeline.sources.provider import HELD_OUT, TRAIN
from pipeline.sources.token_files.choice import max_tokens
from pipeline.tokens.shards import ShardFile, Split, write_shard

PIECE = 2**17  # characters
SHARD_TOKENS = 2**20
TRAINED_CHARACTERS = 2**28  # at most, of the train text, to train a tokenizer
# Limits of a batch of pieces for the tokenizer.
PIECES_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 2**20


# ---- Documents ----


class DocumentReader(ABC):
    """The documents of a source, each with its split.

    Attributes:
      read: what errors and records call the source.
      most: tokens at most of each split; None is all.
      percent: share that is held out, for errors.
      part: number of the source among several.
      share: its share of them.
      counts: documents that were read, by split.
      writers: of the tokens of each split; `write_tokens` sets them.
      enough: whether nothing more is needed to train on.
    """

    read: str
    percent: float
    part: int = 0
    share: float = 1.0

    def __init__(self, most: dict[Split, int | None]):
        self.most = most
        self.counts: Counter[str] = Counter()
        self.writers: dict[Split, SplitWriter] = {}
        self.enough = False

    @abstractmethod
    def documents(self) -> Iterator[tuple[Split, str]]:
        """Yield every document with its split, in their order; may be called twice."""

    def warnings(self) -> list[str]:
        """Return a line on each kind of thing that was left out."""
        return []

    def train_text(self, warnings: list[str]) -> Iterator[str]:
        """Yield the beginning of the text to train a tokenizer on; with a warning if cut short."""
        characters = 0
        for split, document in self.documents():
            if split == TRAIN:
                if characters >= TRAINED_CHARACTERS * self.share:
                    warnings.append(
                        f"{self.read}: the first {characters:,} characters trained the tokenizer"
                    )
                    return
                characters += len(document)
                yield from (piece.text for piece in cut(document))

    def pieces(self) -> Iterator[tuple["SplitWriter", "Piece"]]:
        """Yield the pieces of the documents that there is room for, with what writes their tokens.

        Tokens are written later than pieces are read, so some come that find no room.
        """
        for split, document in self.documents():
            if self.writers[TRAIN].is_full:
                self.enough = True
                if self.writers[HELD_OUT].is_full:
                    return
                if split == TRAIN:
                    continue
            self.counts[split] += 1
            for piece in cut(document):
                yield self.writers[split], piece


class Piece(NamedTuple):
    """A document's text, or a part of it; `ends` if it is the last."""

    text: str
    ends: bool


def cut(text: str) -> Iterator[Piece]:
    """Yield a document in pieces of at most PIECE characters.

    A longer one is cut after a line break between two non-space characters, where common tokenizers
    cut too, so that the tokens are those of the whole. A piece without one is cut before a line
    break, else before a space, else anywhere; that may change the token there.
    """
    start = 0
    while len(text) - start > PIECE:
        stop = start + _border(text[start : start + PIECE + 1])
        yield Piece(text[start:stop], ends=False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], ends=True)


def _border(text: str) -> int:
    """Return where to cut a text of more than PIECE characters."""
    front = 0
    line = text.rfind("\n", 1, PIECE)
    while line > 0:
        if not text[line - 1].isspace():
            if not text[line + 1].isspace():
                return line + 1
            front = front or line
        line = text.rfind("\n", 1, line)
    return front or max(0, text.rfind(" ", 1, PIECE)) or PIECE


@contextmanager
def with_warnings(warnings: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Add to an error that ends the block what was left out, since that may be why it ends."""
    try:
        yield
    except LockstepError as error:
        error.args = ("; ".join([*error.args, *warnings()]),)
        raise


# ---- Tokens ----


def write_tokens(
    readers: Sequence[DocumentReader],
    tokenizer: Tokenizer,
    end: int,
    folder: Path,
    token_size_in_bytes: int,
) -> tuple[ShardFile, ...]:
    """Write the tokens of all documents as shards; `end` follows each document.

    Raises:
      LockstepError: a reader has nothing to train on, none has anything to hold out, or the
        tokenizer has no tokens for a text.
    """
    files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
    for reader in readers:
        reader.writers = {
            split: SplitWriter(folder, split, token_size_in_bytes, most, files[split], reader.part)
            for split, most in reader.most.items()
        }
    coming: deque[SplitWriter] = deque()  # of the pieces that are being encoded

    def pieces() -> Iterator[Piece]:
        for reader in readers:
            for writer, piece in reader.pieces():
                coming.append(writer)
                yield piece

    for tokens_T in encode(tokenizer, end, pieces()):
        coming.popleft().add(tokens_T)
    for reader in readers:
        for writer in reader.writers.values():
            writer.close()
        if not reader.writers[TRAIN].has_written:
            raise _none_in(TRAIN, reader.read, reader.counts, reader.percent)
    if not files[HELD_OUT]:
        counts = sum((reader.counts for reader in readers), Counter())
        raise _none_in(HELD_OUT, names_of(readers), counts, readers[0].percent)
    return (*files[TRAIN], *files[HELD_OUT])


def names_of(readers: Sequence[DocumentReader]) -> str:
    """Return what errors and records call several sources."""
    return " and ".join(reader.read for reader in readers)


def _none_in(split: Split, read: str, counts: Counter[str], percent: float) -> LockstepError:
    return LockstepError(
        f"{read}: found {counts.total():,} documents and none of them in the {split} split, "
        f"expected some; held_out_percent is {percent:g}"
    )


def most_tokens(limit: Limit | None, split: Split) -> int | None:
    """Return how many tokens of a split a limit leaves; None is all of them.

    Steps need whole sequences, and the end of a shard holds none.
    """
    if limit is None or limit.steps is None or split == HELD_OUT:
        return max_tokens(limit)[split]
    per_shard = SHARD_TOKENS // limit.max_seq_len
    if not per_shard:  # no limit gives a sequence that a shard cannot hold
        return None
    shards, more = divmod(limit.sequences, per_shard)
    return shards * SHARD_TOKENS + more * limit.max_seq_len


def encode(tokenizer: Tokenizer, end: int, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
    """Yield the tokens of each piece; `end` follows the last piece of a document.

    Text that spells a special token is plain text.

    Raises:
      LockstepError: the tokenizer has no tokens for a text.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encoded(batch: list[Piece]) -> list[Encoding]:
        texts = [piece.text for piece in batch]
        try:
            return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise LockstepError(
                f"the tokenizer cannot encode this text: {error}, expected one for any text"
            ) from error

    with ThreadPoolExecutor(1) as ahead:  # which encodes a batch while the last one is written
        begun: deque[tuple[list[Piece], Future]] = deque()
        for batch in itertools.chain(_batches(pieces), [None]):
            if batch is not None:
                begun.append((batch, ahead.submit(encoded, batch)))
            if begun and (batch is None or len(begun) > 1):
                done, future = begun.popleft()
                for piece, encoding in zip(done, future.result(), strict=True):
                    tokens = array("I", encoding.ids)  # a third of the time of NumPy's own
                    if piece.ends:
                        tokens.append(end)
                    yield np.frombuffer(tokens, np.uint32)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == PIECES_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class SplitWriter:
    """Writes tokens as shards of SHARD_TOKENS, the last one shorter.

    Args:
      folder: of the shards.
      split: their split.
      token_size_in_bytes: 2 or 4.
      most: tokens at most; None is all that come.
      files: gains the shards; those that other writers put there count in names.
      part: of the data locations that are mixed; 0 if there is only one.
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
        """Whether no further token would be written."""
        return self._left == 0

    def add(self, tokens_T: np.ndarray) -> None:
        """Write tokens, as far as there is room."""
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
        """Write what is left."""
        if self._filled:
            self._write()

    def _write(self) -> None:
        shard_S = self._shard_S[: self._filled]
        file = write_shard(self._folder, self._split, len(self._files), shard_S)
        self._files.append(file.model_copy(update={"part": self._part}))
        self.has_written = True
        self._filled = 0
