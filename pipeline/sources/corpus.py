"""`data_location.Corpus`: text, tokenized here, with a tokenizer of its own or one that is given.

Without a `path` the text is the Python standard library's own source, without its tests, which
every machine has; text_folder.py says what a path is. A document is a text file or a JSON line. An
end token stands behind each document, and nothing before it, as datatrove writes shards.

Whole files are held out, where some come near to `held_out_percent` of the bytes. Where none do, as
with one file or a few large ones, it is a part of each file: documents of JSON lines, chosen by
their number, and the end of a text.

A limit of files is on the train files. A limit of tokens or steps takes the first of the tokens
that there are without it; then at most HELD_OUT_TOKENS are held out.
"""

import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer

from pipeline.errors import LockstepError
from pipeline.runfile.data import DataCorpus, Limit
from pipeline.sources import (
    HELD_OUT,
    HELD_OUT_TOKENS,
    TOKENIZER,
    TRAIN,
    Fetched,
    Survey,
    SurveyedFile,
    Wanted,
    refuse_stream,
)
from pipeline.sources.text import (
    given_tokenizer,
    splitting,
    standard_library,
    text_folder,
    tokenizing,
)
from pipeline.sources.text.documents import Piece, Source, check_unchanged
from pipeline.stage.artifacts import listing_sha256, sha256_file
from pipeline.stage.progress import Progress
from pipeline.tokens.shards import ShardFile

TRAINED_CHARACTERS = 2**28  # at most, of the train text, that a tokenizer is trained on


class Found(NamedTuple):
    """The text that there is.

    Attributes:
      read: what it is, in words.
      root: where it is.
      files: of it, in order.
      whole: whether nothing but whole files may be held out.
      warnings: one line each, for the user.
    """

    read: str
    root: Path
    files: list[Source]
    whole: bool = False
    warnings: tuple[str, ...] = ()


class Words(NamedTuple):
    """What makes tokens of text.

    Attributes:
      tokenizer: its files are in the shards folder.
      end: the id of the token behind each document.
      vocab_size: every id is smaller.
      source: what was read of it, as JSON; nothing where it was trained here.
      warnings: one line each, for the user.
    """

    tokenizer: Tokenizer
    end: int
    vocab_size: int
    source: dict
    warnings: tuple[str, ...] = ()


def survey(location: DataCorpus, wanted: Wanted) -> Survey:
    """The files that would be read; how many tokens they are only tokenizing tells.

    Where a part of each is held out, its bytes are about those.

    Raises:
      LockstepError: there is no text, or too little to hold out whole files of it.
    """
    refuse_stream(location, wanted)
    found, percent = find(location), location.held_out_percent
    plan = _plan(found, percent, wanted.limit)
    all_of_it = _plan(found, percent, None)
    held_out = {
        file.name: int(file.size * percent / 100) if plan.within else file.size
        for file in plan.held_out
    }
    train = {file.name: file.size - held_out.get(file.name, 0) for file in plan.train}
    return Survey(
        read=found.read,
        files=tuple(
            SurveyedFile(name, split, size, None)
            for split, sizes in ((TRAIN, train), (HELD_OUT, held_out))
            for name, size in sizes.items()
        ),
        train_files=len(all_of_it.train),
        warnings=found.warnings,
    )


def fetch(location: DataCorpus, folder: Path, wanted: Wanted) -> Fetched:
    """Tokenizes the text that a run file names.

    Raises:
      LockstepError: as `find` and `fetch_from`; or text is to stay where it is.
    """
    refuse_stream(location, wanted)
    return fetch_from(find(location), location, folder, wanted)


def find(location: DataCorpus) -> Found:
    """The text that a run file names.

    Raises:
      LockstepError: there is none.
    """
    if location.path is not None:
        root = Path(location.path).expanduser()
        files, warnings = text_folder.find(root, location.text_key)
        return Found(location.path, root, files, warnings=warnings)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    # Not under sys.prefix: a virtual environment has no copy of the sources.
    root = Path(sysconfig.get_path("stdlib"))
    files = standard_library.find(root)
    return Found(f"the standard library of {python}", root, files, whole=True)


def fetch_from(found: Found, location: DataCorpus, folder: Path, wanted: Wanted) -> Fetched:
    """Tokenizes text.

    Args:
      found: the text.
      location: the tokenizer, held_out_percent and shuffle.
      folder: where shards and tokenizer go.
      wanted: the limit; the store, for a tokenizer from the hub; and what makes bars.

    Raises:
      LockstepError: a file cannot be read, or changes meanwhile; nothing fits into the held-out
        split, or a split is empty; vocab_size is too large for the text, or there is no such
        tokenizer.
    """
    plan = _plan(found, location.held_out_percent, wanted.limit)
    with _bar(wanted, plan.held_out) as bar:
        train, held_out = splitting.split(plan, location.held_out_percent, bar)

    read: dict[str, Source] = {}
    if location.tokenizer is None:
        words = _train(found, train, location, folder / TOKENIZER, wanted, read)
    else:
        words = _given(location, folder / TOKENIZER, wanted)

    token_size_in_bytes = 2 if words.vocab_size <= 2**16 else 4
    shards: list[ShardFile] = []
    with _bar(wanted, [*train, *held_out]) as bar:
        for split, files in ((TRAIN, train), (HELD_OUT, held_out)):
            encoded = tokenizing.encode(words.tokenizer, words.end, _pieces(files, bar, read))
            most = most_tokens(wanted.limit, split)
            written = tokenizing.write_split(encoded, folder, split, token_size_in_bytes, most)
            if not written:
                raise LockstepError(f"{found.root}: found no text in what is the {split} split")
            shards += written

    for source in read.values():
        check_unchanged(source)
    contents = [(source.name, sha256_file(source.path)) for source in read.values()]
    if words.source:
        contents.append((TOKENIZER, words.source["tokenizer"]["sha256"]))
    return Fetched(
        files=tuple(shards),
        token_size_in_bytes=token_size_in_bytes,
        vocab_size=words.vocab_size,
        shuffle=location.shuffle,
        source={
            "read": found.read,
            "files": len(read),
            "bytes": sum(source.version.size for source in read.values()),
            "held_out_within" if plan.within else "held_out_files": [
                source.name for source in held_out
            ],
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
            **words.source,
        },
        warnings=(*found.warnings, *words.warnings),
    )


def _plan(found: Found, percent: float, limit: Limit | None) -> splitting.Plan:
    where = str(found.root)
    return splitting.plan(found.files, percent, limit, where, whole=found.whole)


def most_tokens(limit: Limit | None, split: str) -> int | None:
    """How many tokens of a split a limit leaves; None: all of them.

    Steps want whole sequences, and the end of a shard holds none.
    """
    if limit is None or limit.files is not None:
        return None
    if split == HELD_OUT:
        return HELD_OUT_TOKENS
    if limit.tokens is not None:
        return limit.tokens
    of_a_shard = tokenizing.SHARD_TOKENS // limit.max_seq_len
    if not of_a_shard:  # no limit gives a sequence that a shard cannot hold
        return None
    shards, more = divmod(limit.sequences, of_a_shard)
    return shards * tokenizing.SHARD_TOKENS + more * limit.max_seq_len


# ---- The tokenizer ----


def _train(
    found: Found,
    train: list[Source],
    location: DataCorpus,
    into: Path,
    wanted: Wanted,
    read: dict[str, Source],
) -> Words:
    """One that is trained on the train text."""
    warnings = []
    with _bar(wanted, train) as bar:
        texts = _first(_pieces(train, bar, read), str(found.root), warnings)
        tokenizer = tokenizing.train_tokenizer(texts, location.vocab_size, str(found.root))
    tokenizing.save_tokenizer(tokenizer, into)
    end = tokenizer.token_to_id(tokenizing.END)
    return Words(tokenizer, end, location.vocab_size, {}, tuple(warnings))


def _first(pieces: Iterable[Piece], where: str, warnings: list[str]) -> Iterator[str]:
    """The first TRAINED_CHARACTERS, about; with a warning where there are more."""
    characters = 0
    for piece in pieces:
        if characters >= TRAINED_CHARACTERS:
            warnings.append(f"{where}: the first {characters:,} characters trained the tokenizer")
            return
        characters += len(piece.text)
        yield piece.text


def _given(location: DataCorpus, into: Path, wanted: Wanted) -> Words:
    """One from a folder or the hub."""
    given = given_tokenizer.find(location, wanted.store / "hub")
    tokenizer = given_tokenizer.load(given.folder)
    given_tokenizer.copy(given.folder, into)
    return Words(
        tokenizer,
        given_tokenizer.end_token(given.folder, tokenizer),
        given_tokenizer.count_vocab(tokenizer),
        {"tokenizer": given.source},
        given.warnings,
    )


# ---- Both ----


def _pieces(files: Iterable[Source], bar: Progress, read: dict[str, Source]) -> Iterator[Piece]:
    """The documents of these files, one file after the other; notes which were opened."""
    for file in files:
        read[file.name] = file
        yield from file.pieces(bar)


def _bar(wanted: Wanted, files: list[Source]) -> Progress:
    return wanted.progress(total=sum(file.size for file in files), unit="byte")
