"""`data_location.Corpus`: text that every machine has, and a tokenizer trained on it.

The text is the Python standard library's own source, without its tests. A byte-level BPE is trained
on the train files alone. A document is one file, and `<|endoftext|>` ends each.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.artifacts import listing_sha256, write_bytes, write_json, write_text
from pipeline.errors import LockstepError
from pipeline.locations import DataCorpus
from pipeline.progress import Progress
from pipeline.providers import (
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Fetched,
    MakeBar,
    shard_path,
)

END, PAD = "<|endoftext|>", "<|pad|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SHARD_TOKENS = 2**20
FILES_AT_ONCE = 64

SKIP_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written when a Python is built or packaged: they differ between machines with the same Python.
SKIP_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


def fetch(location: DataCorpus, folder: Path, progress: MakeBar) -> Fetched:
    """Tokenizes the standard library of the running Python.

    Raises:
      LockstepError: as `fetch_from`.
    """
    python = f"{platform.python_implementation()} {platform.python_version()}"
    # Not under sys.prefix: a virtual environment has no copy of the sources.
    root = Path(sysconfig.get_path("stdlib"))
    return fetch_from(root, f"the standard library of {python}", location, folder, progress)


def fetch_from(
    root: Path, what: str, location: DataCorpus, folder: Path, progress: MakeBar
) -> Fetched:
    """Tokenizes the `.py` files under a folder, with a tokenizer trained on them.

    Args:
      root: the folder of the sources.
      what: what these are, in words.
      location: vocab_size, held_out_percent (of bytes) and shuffle.
      folder: where shards and tokenizer go.
      progress: makes a bar for each part of the work.

    Raises:
      LockstepError: there are no sources, none that fits into the held-out split, or vocab_size is
        too small for the bytes or too large for the corpus.
    """
    sizes = source_files(root)
    if not sizes:
        raise LockstepError(f"{root}: found no Python sources, expected {what}")
    train, held_out = split_by_file(sizes, location.held_out_percent)
    if not held_out:
        raise LockstepError(
            f"model.LLM.data_location.Corpus.held_out_percent: found {location.held_out_percent}, "
            f"expected enough to hold out one of the {len(sizes)} files in {root}"
        )

    tokenizer = train_tokenizer(root, train, location.vocab_size, progress)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    token_size_in_bytes = 2 if location.vocab_size <= 2**16 else 4
    with progress(total=len(sizes), unit="files tokenized") as bar:
        for split, names in ((TRAIN, train), (HELD_OUT, held_out)):
            documents = _encode(tokenizer, root, names, bar)
            write_split(documents, folder, split, token_size_in_bytes)

    contents = ((name, hashlib.sha256((root / name).read_bytes()).hexdigest()) for name in sizes)
    return Fetched(
        token_size_in_bytes=token_size_in_bytes,
        vocab_size=location.vocab_size,
        shuffle=location.shuffle,
        source={
            "read": what,
            "files": len(sizes),
            "bytes": sum(sizes.values()),
            "held_out_files": held_out,
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
        },
    )


def source_files(root: Path) -> dict[str, int]:
    """The `.py` files under a folder that hold anything, tests apart: name -> bytes, by name."""
    sizes = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _wanted(name) and name not in SKIP_FOLDERS]
        for name in names:
            path = Path(parent, name)
            if name.endswith(".py") and _wanted(name) and (size := path.stat().st_size):
                sizes[path.relative_to(root).as_posix()] = size
    return dict(sorted(sizes.items()))


def _wanted(name: str) -> bool:
    return not name.startswith(SKIP_PREFIXES)


def split_by_file(sizes: dict[str, int], held_out_percent: float) -> tuple[list[str], list[str]]:
    """Train and held-out names: in the order of the SHA-256 of their names, files are held out as
    long as they fit in `held_out_percent` of all bytes.

    The order does not depend on what else there is, so another version of the corpus holds out
    nearly the same files. One large file does not make the held-out part a multiple of what was
    asked for, as a hash against a threshold would (5 % of files were 10 % of bytes).
    """
    room = sum(sizes.values()) * held_out_percent / 100
    held_out = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    return [name for name in sizes if name not in held_out], sorted(held_out)


def train_tokenizer(root: Path, names: list[str], vocab_size: int, progress: MakeBar) -> Tokenizer:
    """A byte-level BPE (as GPT-2's) of exactly `vocab_size` tokens; the same files give the same.

    Raises:
      LockstepError: the text has too few pairs to merge.
    """
    key = "model.LLM.data_location.Corpus.vocab_size"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    with progress(total=len(names), unit="files read for the tokenizer") as bar:
        tokenizer.train_from_iterator(_texts(root, names, bar), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise LockstepError(
            f"{key}: found {vocab_size}, expected at most {tokenizer.get_vocab_size()}: the "
            f"{len(names)} train files in {root} have no more pairs to merge"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer as transformers 4 and 5 read it; what 5 itself writes, 4 cannot read."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, said in (("tokenizer_config", config | special), ("special_tokens_map", special)):
        write_json(folder / f"{name}.json", said)


def write_split(
    documents: Iterable[np.ndarray], folder: Path, split: str, token_size_in_bytes: int
) -> None:
    """Joins token arrays and cuts them into shards of SHARD_TOKENS, the last one shorter."""
    (folder / split).mkdir()
    rest, number = np.empty(0, f"<u{token_size_in_bytes}"), 0
    for tokens_T in documents:
        rest = np.concatenate([rest, tokens_T.astype(rest.dtype)])
        while len(rest) >= SHARD_TOKENS:
            write_bytes(shard_path(folder, split, number), rest[:SHARD_TOKENS].tobytes())
            rest, number = rest[SHARD_TOKENS:], number + 1
    if len(rest):
        write_bytes(shard_path(folder, split, number), rest.tobytes())


def _encode(
    tokenizer: Tokenizer, root: Path, names: list[str], bar: Progress
) -> Iterator[np.ndarray]:
    end = tokenizer.token_to_id(END)
    # A source that spells a special token is text like any other.
    tokenizer.encode_special_tokens = True
    for start in range(0, len(names), FILES_AT_ONCE):
        texts = list(_texts(root, names[start : start + FILES_AT_ONCE], bar))
        for encoding in tokenizer.encode_batch_fast(texts):
            yield np.array([*encoding.ids, end])


def _texts(root: Path, names: list[str], bar: Progress) -> Iterator[str]:
    for name in names:
        yield (root / name).read_bytes().decode("utf-8", errors="replace")
        bar.advance()
