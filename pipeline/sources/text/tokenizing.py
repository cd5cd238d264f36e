"""Text into tokens: a byte-level BPE trained on it, and the shards made with a tokenizer."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.errors import LockstepError
from pipeline.sources.text.documents import Piece
from pipeline.stage.artifacts import write_json, write_text
from pipeline.tokens.shards import ShardFile, Split, write_shard

END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SHARD_TOKENS = 2**20
# Limits of a batch of pieces for the tokenizer.
PIECES_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 2**20


def train_tokenizer(texts: Iterable[str], vocab_size: int, where: str) -> Tokenizer:
    """Train a byte-level BPE (as GPT-2's) of exactly `vocab_size` tokens; it is deterministic.

    The vocabulary is 256 bytes, END, PAD and merges; `where` names the corpus in errors.

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
            f"model.LLM.data_location.Corpus.vocab_size: found {vocab_size}, expected at most "
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
    for batch in _batches(pieces):
        texts = [piece.text for piece in batch]
        try:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise LockstepError(
                f"the tokenizer cannot encode this text: {error}, expected one for any text"
            ) from error
        for piece, encoding in zip(batch, encodings, strict=True):
            yield np.array([*encoding.ids, end] if piece.ends else encoding.ids, np.uint32)


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
    shard_S, filled = np.empty(SHARD_TOKENS, f"<u{token_size_in_bytes}"), 0
    files: list[ShardFile] = []
    for tokens_T in tokens:
        if most is not None:
            tokens_T = tokens_T[:most]
            most -= len(tokens_T)
        while len(tokens_T):
            part_t = tokens_T[: SHARD_TOKENS - filled]
            shard_S[filled : filled + len(part_t)] = part_t
            tokens_T, filled = tokens_T[len(part_t) :], filled + len(part_t)
            if filled == SHARD_TOKENS:
                files.append(write_shard(folder, split, len(files), shard_S))
                filled = 0
        if most == 0:
            break
    if filled:
        files.append(write_shard(folder, split, len(files), shard_S[:filled]))
    return files
