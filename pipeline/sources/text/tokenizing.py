"""Text into tokens: documents of one or several readers are encoded, and written as shards.

The tokenizer is a byte-level BPE trained on the text, or one that exists already. An end token
follows each document and nothing precedes it, as in shards of datatrove.

Shapes: T tokens of a piece, S of a shard.
"""

import itertools
import re
import shutil
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.errors import LockstepError, expecting
from lockstep.files import read_json, sha256_file, write_json
from lockstep.tables.variant import variant_name
from pipeline.net.transfers import hub_files
from pipeline.runfile.data import Limit, TokenizedText
from pipeline.sources.provider import HELD_OUT, TRAIN, Fetched, FetchOptions
from pipeline.sources.text import split_writer
from pipeline.sources.text.near_duplicates import leave_out
from pipeline.sources.text.split_writer import SplitWriter
from pipeline.sources.token_files.listing import max_tokens
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.untrusted_files import check_file, expand, unchanged
from pipeline.tokens.shards import Part, ShardFile, Split
from pipeline.tokens.tokenizer_files import (
    MOST_BYTES,
    SETTINGS,
    SPECIAL,
    TOKENIZER,
    TOKENIZER_FILES,
    Tokenless,
    convert_older,
    load_tokenizer,
    save_tokenizer,
    vocab_size,
)

PIECE_CHARACTERS = 2**17
# Up to the last line break between two non-space characters, and up to the last after one.
LINE, TEXT = re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*\S(?=\n)", re.DOTALL)
TRAINED_CHARACTERS = 2**28  # at most, of the train text, to train a tokenizer
# Limits of a batch of pieces for the tokenizer.
PIECES_AT_ONCE, CHARACTERS_AT_ONCE = 1024, 2**20
END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
CONFIG = "config.json"  # may say of which class a tokenizer in an older form is
TOKENIZER_NAMES = (*TOKENIZER_FILES, CONFIG)
# Tokens that end a document, where no file of a tokenizer names one: the first that it has.
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


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
      borders: numbers of held-out documents with which another group begins, such as a package.
      repeated: numbers of those that are left out, since they stand in the train split.
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
        self.borders: frozenset[int] = frozenset()
        self.repeated: set[int] = set()

    @abstractmethod
    def documents(self) -> Iterator[tuple[Split, str]]:
        """Yield every document with its split, in their order; may be called twice."""

    @abstractmethod
    def contents(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the SHA-256 of each file that was read."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return what shards.json has of the source."""

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
        """Yield the pieces of the documents that there is room for, each with its writer.

        Tokens are written later than pieces are read, so some pieces find no room.
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
    """A document's text to tokenize, or a part of it; `ends` if it is the last."""

    text: str
    ends: bool


def cut(text: str) -> Iterator[Piece]:
    """Yield a document in pieces to tokenize, of at most PIECE_CHARACTERS characters.

    A longer one is cut after a line break between two non-space characters, where common tokenizers
    cut too, so that byte-level ones give the tokens of the whole. (Where a tokenizer writes a space
    before a text, as SentencePiece's do, each piece has one.) A piece without such a break is cut
    before a line break, else before a space, else anywhere; that may change the token there.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = start + _border(text[start : start + PIECE_CHARACTERS + 1])
        yield Piece(text[start:stop], ends=False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], ends=True)


def _border(text: str) -> int:
    """Return where to cut a text to tokenize of more than PIECE_CHARACTERS characters."""
    if (after := LINE.match(text)) or (before := TEXT.match(text, 0, PIECE_CHARACTERS)):
        return (after or before).end()
    return max(0, text.rfind(" ", 1, PIECE_CHARACTERS)) or PIECE_CHARACTERS


# ---- Tokens ----


def tokenize(
    location: TokenizedText,
    readers: Sequence[DocumentReader],
    folder: Path,
    options: FetchOptions,
    parts: tuple[Part, ...] = (),
) -> Fetched:
    """Make shards of all documents, in an empty folder, with the tokenizer of a run file.

    Where several readers are mixed, `parts` says how.

    Raises:
      LockstepError: a split has no documents, or there is no such tokenizer; with what was left out
        of the text, since that may be why.
    """
    try:
        encoder = make_encoder(location, readers, folder / "tokenizer", options)
        size = 2 if encoder.vocab_size <= 2**16 else 4
        tokenless = Tokenless(encoder.tokenizer)
        files = write_tokens(readers, encoder, tokenless, folder, size)
        if (most_percent := location.most_seen_percent) is not None:
            borders = readers[0].borders if len(readers) == 1 else ()
            files, left_out = leave_out(folder, files, size, encoder.end, most_percent, borders)
            for reader in readers:
                reader.repeated = {number for part, number in left_out if part == reader.part}
    except LockstepError as error:
        left_out = (line for reader in readers for line in reader.warnings())
        error.args = ("; ".join([*error.args, *left_out]),)
        raise
    contents = [content for reader in readers for content in reader.contents()]
    if encoder.source:
        contents.append(("tokenizer", encoder.source["tokenizer"]["sha256"]))
    recorded = [reader.record() for reader in readers]
    return Fetched(
        files=files,
        token_size_in_bytes=size,
        vocab_size=encoder.vocab_size,
        shuffle=location.shuffle,
        source={
            "read": names_of(readers),
            **({"sources": recorded} if parts else recorded[0]),
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
            **encoder.source,
            **({"without_token": tokenless.count} if tokenless.count else {}),
        },
        parts=parts,
        warnings=(
            *(line for reader in readers for line in reader.warnings()),
            *encoder.warnings,
            *_without_token(names_of(readers), tokenless),
        ),
    )


def _without_token(read: str, tokenless: Tokenless) -> Iterator[str]:
    if tokenless.count and tokenless.name is None:
        yield f"{read}: {tokenless.count:,} characters have no token, and are left out"
    elif tokenless.count:
        yield f"{read}: {tokenless.count:,} tokens are {tokenless.name}, for what has no token"


def write_tokens(
    readers: Sequence[DocumentReader],
    encoder: "Encoder",
    tokenless: Tokenless,
    folder: Path,
    token_size_in_bytes: int,
) -> tuple[ShardFile, ...]:
    """Write the tokens of all documents as shards; an end token follows each document."""
    files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
    for reader in readers:
        reader.writers = {
            split: SplitWriter(folder, split, token_size_in_bytes, most, files[split], reader.part)
            for split, most in reader.most.items()
        }
    writers: deque[SplitWriter] = deque()  # of the pieces that are being encoded

    def pieces() -> Iterator[Piece]:
        for reader in readers:
            for writer, piece in reader.pieces():
                writers.append(writer)
                yield piece

    for tokens_T in encode(encoder, tokenless, pieces()):
        writers.popleft().add(tokens_T)
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
    """Return what errors and records call several tokenized sources."""
    return " and ".join(reader.read for reader in readers)


def _none_in(split: Split, read: str, counts: Counter[str], percent: float) -> LockstepError:
    return LockstepError(
        f"{read}: found {counts.total():,} documents and none of them in the {split} split, "
        f"expected some; held_out_percent is {percent:g}"
    )


def most_tokens(limit: Limit | None, split: Split) -> int | None:
    """Return how many tokens of a tokenized split a limit leaves; None is all of them.

    Steps need whole sequences, and the end of a shard holds none.
    """
    if limit is None or limit.steps is None or split == HELD_OUT:
        return max_tokens(limit)[split]
    per_shard = split_writer.SHARD_TOKENS // limit.max_seq_len
    if not per_shard:  # no limit gives a sequence that a shard cannot hold
        return None
    shards, remainder = divmod(limit.sequences, per_shard)
    return shards * split_writer.SHARD_TOKENS + remainder * limit.max_seq_len


def encode(
    encoder: "Encoder", tokenless: Tokenless, pieces: Iterable[Piece]
) -> Iterator[np.ndarray]:
    """Yield the tokens of each piece; an end token follows the last piece of a document.

    Text that spells a special token is plain text. What has no token is counted.
    """
    tokenizer, end = encoder.tokenizer, encoder.end
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encoded(batch: list[Piece]) -> list[list[int]]:
        texts = [piece.text for piece in batch]
        # the library raises bare Exceptions
        with expecting("the tokenizer cannot encode this text", "one for any text", Exception):
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in found]
        tokenless.add(texts, ids)
        return ids

    with ThreadPoolExecutor(1) as executor:  # encodes a batch while the last one is written
        pending: deque[tuple[list[Piece], Future]] = deque()
        for batch in itertools.chain(_batches(pieces), [None]):
            if batch is not None:
                pending.append((batch, executor.submit(encoded, batch)))
            if pending and (batch is None or len(pending) > 1):
                done, future = pending.popleft()
                for piece, ids in zip(done, future.result(), strict=True):
                    tokens = array("I", ids)  # a third of the time of NumPy's own
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


# ---- The tokenizer ----


class Encoder(NamedTuple):
    """What turns text into tokens: a tokenizer whose files are in the shards folder.

    `end` is the id of the token after each document, and `vocab_size` bounds all ids. `source` is
    JSON of the files that were read, empty if the tokenizer was trained here.
    """

    tokenizer: Tokenizer
    end: int
    vocab_size: int
    source: dict
    warnings: tuple[str, ...] = ()


def make_encoder(
    location: TokenizedText, readers: Sequence[DocumentReader], target: Path, options: FetchOptions
) -> Encoder:
    """Put the tokenizer of a run file in place: train it on the text, or copy the one it names."""
    if location.tokenizer is not None:
        return copy_tokenizer(location, target, options)
    warnings: list[str] = []
    tokenizer = train_tokenizer(
        (text for reader in readers for text in reader.train_text(warnings)),
        location.vocab_size,
        names_of(readers),
        f"{variant_name(location)}.vocab_size",
    )
    save_tokenizer(tokenizer, target, {"bos_token": END, "eos_token": END, "pad_token": PAD})
    end = tokenizer.token_to_id(END)
    return Encoder(tokenizer, end, location.vocab_size, {}, tuple(warnings))


def train_tokenizer(texts: Iterable[str], vocab_size: int, where: str, key: str) -> Tokenizer:
    """Train a byte-level BPE (as GPT-2's) of exactly `vocab_size` tokens; it is deterministic.

    The vocabulary is 256 bytes, END, PAD and merges; `where` names the text in errors, and `key`
    the size in the run file.
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


def copy_tokenizer(location: TokenizedText, target: Path, options: FetchOptions) -> Encoder:
    """Copy the tokenizer that a run file names, without any other file.

    It is the folder `tokenizer`, if that exists and no revision is given, else the hub's.
    """
    key = f"{variant_name(location)}.tokenizer"
    folder, commit, warnings = expand(location.tokenizer, key), None, ()
    name, revision = f"{key}: {location.tokenizer}", location.tokenizer_revision
    if revision is not None or not folder.is_dir():
        if revision is not None:
            name += f" at {revision}"
        expected = "a folder with a tokenizer.json, or owner/name on the hub"
        folder, _ = hub_files.download(
            name,
            location.tokenizer,
            revision,
            options.store,
            TOKENIZER_NAMES,
            expected,
            options.network,
            options.progress,
        )
        commit = folder.name
        if revision != commit:
            warnings = (hub_files.pin_advice(name, commit, "tokenizer_revision"),)
    is_older = not (folder / TOKENIZER).is_file()
    names = TOKENIZER_NAMES if is_older else TOKENIZER_FILES
    files = [folder / file for file in names if (folder / file).is_file()]
    for file in files:
        check_file(file, folder, most=MOST_BYTES)
    with unchanged(files):
        sha256 = listing_sha256((file.name, sha256_file(file)) for file in files)
        target.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        if is_older:
            convert_older(target, name)
            (target / CONFIG).unlink(missing_ok=True)
            folder = target
        if not (folder / TOKENIZER).is_file():
            raise LockstepError(f"{name}: found no tokenizer.json, expected one")
        tokenizer = load_tokenizer(folder / TOKENIZER)
        end = _end_token(folder, tokenizer, key)
        if not any(_eos_token(target / name) for name in (SETTINGS, SPECIAL)):
            _name_end(target / SETTINGS, tokenizer.id_to_token(end))
    source = {"read": location.tokenizer, "revision": revision, "commit": commit, "sha256": sha256}
    return Encoder(tokenizer, end, vocab_size(tokenizer), {"tokenizer": source}, warnings)


def _end_token(folder: Path, tokenizer: Tokenizer, key: str) -> int:
    """Return the id of the token that ends a document.

    It is the `eos_token` of the tokenizer's files, else the first of ENDS that it has. `key` is
    the tokenizer's in the run file.
    """
    for name in (SETTINGS, SPECIAL):
        token = _eos_token(folder / name)
        if token is not None:
            index = tokenizer.token_to_id(token)
            if index is None:
                raise LockstepError(
                    f"{folder / name}: eos_token is {token!r}, expected a token of the "
                    "tokenizer.json beside it"
                )
            return index
    for token in ENDS:
        index = tokenizer.token_to_id(token)
        if index is not None:
            return index
    raise LockstepError(
        f"{key}: {folder} has no token that ends a document, expected eos_token in its "
        f"tokenizer_config.json, or one of {', '.join(ENDS)}"
    )


def _name_end(path: Path, token: str) -> None:
    """Say in a tokenizer's files what ends a document, so that a text of the export ends there."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= read_json(path) if path.is_file() else {}
    write_json(path, settings | {"eos_token": token})


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    token = read_json(path).get("eos_token")
    if isinstance(token, dict):  # as transformers 4 writes it
        token = token.get("content")
    if not isinstance(token, str | None):
        raise LockstepError(f"{path}: eos_token is {token!r:.60}, expected a string")
    return token
