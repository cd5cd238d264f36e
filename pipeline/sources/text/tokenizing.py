"""Text into tokens: a byte-level BPE trained on it, and the shards that a tokenizer makes of it."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.errors import LockstepError
from pipeline.sources.text.documents import Piece
from pipeline.stage.artifacts import write_bytes, write_json, write_text
from pipeline.tokens.shards import ShardFile, Split, shard_path

END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SHARD_TOKENS = 2**20
# Pieces go to the tokenizer together until there are so many, or so many characters in them.
PIECES_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 2**20


def train_tokenizer(texts: Iterable[str], vocab_size: int, where: str) -> Tokenizer:
    """A byte-level BPE (as GPT-2's) of exactly `vocab_size` tokens; the same text gives the same.

    Args:
      texts: what it is trained on.
      vocab_size: 256 bytes, END, PAD and merges.
      where: the text, in words.

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
    """Writes a tokenizer as transformers 4 and 5 read it; what 5 itself writes, 4 cannot read."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, said in (("tokenizer_config", config | special), ("special_tokens_map", special)):
        write_json(folder / f"{name}.json", said)


def encode(tokenizer: Tokenizer, end: int, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
    """The tokens of each piece; `end` follows the last piece of a document, and nothing begins one.

    Text that spells a special token is text like any other.

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
    """Joins token arrays and cuts them into shards of SHARD_TOKENS, the last one shorter.

    Args:
      tokens: arrays of ids; no more of them are asked for than are needed.
      folder: the shards folder.
      split: its name.
      token_size_in_bytes: 2 or 4.
      most: tokens that are written at most; None: all.
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
                files.append(_write(shard_S, folder, split, len(files)))
                filled = 0
        if most == 0:
            break
    if filled:
        files.append(_write(shard_S[:filled], folder, split, len(files)))
    return files


def _write(shard_S: np.ndarray, folder: Path, split: Split, number: int) -> ShardFile:
    path, data = shard_path(Path(), split, number), shard_S.tobytes()
    write_bytes(folder / path, data)
    return ShardFile(
        path=path.as_posix(),
        split=split,
        tokens=len(shard_S),
        sha256=hashlib.sha256(data).hexdigest(),
        name=path.as_posix(),
    )
