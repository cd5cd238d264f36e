"""Text into tokens: a byte-level BPE trained on it, and the shards made with a tokenizer."""

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.errors import LockstepError
from lockstep.files import write_json, write_text
from pipeline.sources.text.documents import Piece
from pipeline.tokens.shards import ShardFile, Split, write_shard

END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SHARD_TOKENS = 2**20
CORPUS_KEY = "model.LLM.data_location.Corpus.vocab_size"
# Limits of a batch of pieces for the tokenizer.
PIECES_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 2**20


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, where: str, key: str = CORPUS_KEY
) -> Tokenizer:
    """Train a byte-level BPE (as GPT-2's) of exactly `vocab_size` tokens; it is deterministic.

    The vocabulary is 256 bytes, END, PAD and merges; `where` names the text in errors, and `key`
    the size in the run file.

    Raises:
      LockstepError: the text has too few pairs to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise LockstepError(
            f"{key}: found {vocab_size}, expected at most "
            f"{tokenizer.get_vocab_size()}: the train text in {where} has no more pairs to merge"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer as transformers 4 and 5 read it; version 4 cannot read what 5 writes."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, table in (("tokenizer_config", config | special), ("special_tokens_map", special)):
        write_json(folder / f"{name}.json", table)


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


def write_split(
    tokens: Iterable[np.ndarray],
    folder: Path,
    split: Split,
    token_size_in_bytes: int,
    most: int | None = None,
) -> list[ShardFile]:
    """Write the first `most` tokens, or all, as shards of SHARD_TOKENS, the last one shorter.

    The arrays of `tokens` are read only as far as needed.
    """
    writer = SplitWriter(folder, split, token_size_in_bytes, most)
    for tokens_T in tokens:
        writer.add(tokens_T)
        if writer.is_full:
            break
    return writer.close()


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

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        split: Split,
        token_size_in_bytes: int,
        most: int | None,
        files: list[ShardFile] | None = None,
        part: int = 0,
    ):
        self._folder, self._split, self._left = folder, split, most
        self._shard_S, self._filled = np.empty(SHARD_TOKENS, f"<u{token_size_in_bytes}"), 0
        self.files: list[ShardFile] = [] if files is None else files
        self._part, self.has_written = part, False

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

    def close(self) -> list[ShardFile]:
        """Write what is left; return all files."""
        if self._filled:
            self._write()
        return self.files

    def _write(self) -> None:
        shard_S = self._shard_S[: self._filled]
        file = write_shard(self._folder, self._split, len(self.files), shard_S)
        self.files.append(file.model_copy(update={"part": self._part}))
        self.has_written = True
        self._filled = 0
