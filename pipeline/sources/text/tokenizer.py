"""The tokenizer of text: a byte-level BPE trained on it, or one that exists already."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from lockstep.tables.variant import variant_name
from pipeline.net.transfers import hub_files
from pipeline.runfile.data import TokenizedText
from pipeline.sources.provider import FetchOptions
from pipeline.sources.text.tokenizing import DocumentReader, names_of
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import check_file, expand, unchanged
from pipeline.tokens.tokenizer_files import (
    MOST_BYTES,
    SETTINGS,
    SPECIAL,
    TOKENIZER,
    TOKENIZER_FILES,
    convert_older,
    load_tokenizer,
    save_tokenizer,
    vocab_size,
)

END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
CONFIG = "config.json"  # may say of which class a tokenizer in an older form is
NAMES = (*TOKENIZER_FILES, CONFIG)
# Tokens that end a document, where no file of a tokenizer names one: the first that it has.
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class Encoder(NamedTuple):
    """What turns text into tokens.

    Attributes:
      tokenizer: the tokenizer, whose files are in the shards folder.
      end: id of the token after each document.
      vocab_size: bound of the ids.
      source: JSON of the files that were read; empty if the tokenizer was trained here.
      warnings: one line each, for the user.
    """

    tokenizer: Tokenizer
    end: int
    vocab_size: int
    source: dict
    warnings: tuple[str, ...] = ()

    @property
    def token_size_in_bytes(self) -> int:
        """Bytes that hold any id."""
        return 2 if self.vocab_size <= 2**16 else 4


def make_encoder(
    location: TokenizedText, readers: Sequence[DocumentReader], target: Path, options: FetchOptions
) -> Encoder:
    """Put the tokenizer of a run file in place: train it on the text, or copy the one it names.

    Raises:
      LockstepError: see `train_tokenizer` and `copy_tokenizer`.
    """
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


def copy_tokenizer(location: TokenizedText, target: Path, options: FetchOptions) -> Encoder:
    """Copy the tokenizer that a run file names, without any other file.

    It is the folder `tokenizer`, if that exists and no revision is given, else the hub's.

    Raises:
      LockstepError: it does not exist, cannot be read, is no tokenizer, or has no end token.
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
            NAMES,
            expected,
            options.network,
            options.progress,
        )
        commit = folder.name
        if revision != commit:
            warnings = (hub_files.pin_advice(name, commit, "tokenizer_revision"),)
    is_older = not (folder / TOKENIZER).is_file()
    names = NAMES if is_older else TOKENIZER_FILES
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


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    token = read_json(path).get("eos_token")
    if isinstance(token, dict):  # as transformers 4 writes it
        token = token.get("content")
    if not isinstance(token, str | None):
        raise LockstepError(f"{path}: eos_token is {token!r:.60}, expected a string")
    return token
