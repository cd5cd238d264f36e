"""`data_location.Corpus`: text, tokenized here, with a tokenizer of its own or a given one.

Without a `path` the text is the source of packages that constraints.txt pins, which every machine
has; text_folder.py says what a path may be. A document is a text file or a JSON line.
An end token follows each document and nothing precedes it, as in shards of datatrove.

Whole files are held out, if some come near `held_out_percent` of the bytes. If none do, as with one
file or a few large ones, a part of each file is: documents of JSON lines, chosen by their number,
and the end of a text. A file that is named as a train file of the folder but for the word of its
split, such as test.txt beside train.txt, is held out whole.

A limit of files is on the train files. A limit of tokens or steps takes the first of the tokens
that there are without it; then at most HELD_OUT_TOKENS are held out.
"""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from pipeline.runfile.data import DataCorpus, Limit
from pipeline.sources import (
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Fetched,
    FetchOptions,
    Survey,
    SurveyedFile,
)
from pipeline.sources.choice import max_tokens
from pipeline.sources.text import (
    given_tokenizer,
    package_sources,
    splitting,
    text_folder,
    tokenizing,
)
from pipeline.sources.text.documents import Piece, Source, saying
from pipeline.sources.text.given_tokenizer import CorpusTokenizer
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import check_unchanged, expand
from pipeline.stage.progress import Progress
from pipeline.tokens import signs
from pipeline.tokens.shards import ShardFile, Split

MAKES_TOKENS = True
TRAINED_CHARACTERS = 2**28  # at most, of the train text, to train a tokenizer


class Text(NamedTuple):
    """The text of a corpus; `whole` says whether only whole files of it may be held out."""

    read: str
    root: Path
    files: list[Source]
    whole: bool = False
    warnings: tuple[str, ...] = ()


def survey(location: DataCorpus, options: FetchOptions) -> Survey:
    """Describe the files that would be read; how many tokens they are only tokenizing tells.

    Where a part of each file is held out, its size is approximate.

    Raises:
      LockstepError: there is no text, or too little to hold out whole files of it.
    """
    text, percent = _find(location), location.held_out_percent
    plan = _plan(text, percent, options.limit)
    held_out = {
        file.name: int(file.size * percent / 100) if plan.within else file.size
        for file in plan.held_out
    } | {file.name: file.size for file in plan.named}
    train = {file.name: file.size - held_out.get(file.name, 0) for file in plan.train}
    return Survey(
        read=text.read,
        files=tuple(
            SurveyedFile(name, split, size, None)
            for split, sizes in ((TRAIN, train), (HELD_OUT, held_out))
            for name, size in sizes.items()
        ),
        train_files=len(_plan(text, percent, None).train),
        warnings=text.warnings,
        text_bytes=None if any(name.endswith(".gz") for name in train) else sum(train.values()),
    )


def source_sha256(location: DataCorpus, options: FetchOptions) -> str | None:
    """Return the SHA-256 of the text, if `fetch` would read all of it and nothing else."""
    if options.limit is not None or location.tokenizer is not None:
        return None
    text = _find(location)
    plan = _plan(text, location.held_out_percent, None)
    try:
        return listing_sha256((name, sha256_file(one.path)) for name, one in plan.files.items())
    except OSError:  # `fetch` says which
        return None


def _find(location: DataCorpus) -> Text:
    if location.path is not None:
        root = expand(location.path, text_folder.PATH)
        files, warnings = text_folder.find(root, location.text_key)
        return Text(location.path, root, files, warnings=warnings)
    root = Path(sysconfig.get_path("purelib"))
    return Text(package_sources.describe(), root, package_sources.find(), whole=True)


def fetch(location: DataCorpus, folder: Path, options: FetchOptions) -> Fetched:
    """Tokenize the text that a run file names.

    Raises:
      LockstepError: there is no text, a file cannot be read, or changes meanwhile; nothing fits
        into the held-out split, or a split is empty; vocab_size is too large for the text, or there
        is no such tokenizer.
    """
    text = _find(location)
    with saying(lambda: text.warnings):
        return _fetch(text, location, folder, options)


def _fetch(text: Text, location: DataCorpus, folder: Path, options: FetchOptions) -> Fetched:
    plan = _plan(text, location.held_out_percent, options.limit)
    with _bar(options, plan.held_out) as bar:
        train, held_out = splitting.split(plan, location.held_out_percent, bar)

    read: dict[str, Source] = {}
    if location.tokenizer is None:
        encoder = _train_tokenizer(text, train, location, folder / TOKENIZER, options, read)
    else:
        encoder = given_tokenizer.copy_tokenizer(location, folder / TOKENIZER, options)

    token_size_in_bytes = 2 if encoder.vocab_size <= 2**16 else 4
    shards: list[ShardFile] = []
    with _bar(options, [*train, *held_out]) as bar:
        for split, files in ((TRAIN, train), (HELD_OUT, held_out)):
            encoded = tokenizing.encode(encoder.tokenizer, encoder.end, _pieces(files, bar, read))
            most = most_tokens(options.limit, split)
            written = tokenizing.write_split(encoded, folder, split, token_size_in_bytes, most)
            if not written:
                raise LockstepError(f"{text.root}: found no text in what is the {split} split")
            shards += written

    contents = [(source.name, sha256_file(source.path)) for source in read.values()]
    for source in read.values():  # also since it was hashed
        check_unchanged(source.path, source.version)
    if encoder.source:
        contents.append((TOKENIZER, encoder.source["tokenizer"]["sha256"]))
    return Fetched(
        files=tuple(shards),
        token_size_in_bytes=token_size_in_bytes,
        vocab_size=encoder.vocab_size,
        shuffle=location.shuffle,
        source={
            "read": text.read,
            "files": len(read),
            "bytes": sum(source.version.size for source in read.values()),
            "held_out_within" if plan.within else "held_out_files": [
                source.name for source in held_out
            ],
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
            **encoder.source,
        },
        warnings=(*text.warnings, *encoder.warnings),
    )


def _plan(text: Text, percent: float, limit: Limit | None) -> splitting.Plan:
    names = () if text.whole else [file.name for file in text.files]
    named = signs.held_out_beside(names)
    files = [file for file in text.files if file.name not in named]
    plan = splitting.plan(files, percent, limit, str(text.root), whole=text.whole)
    return plan._replace(named=[file for file in text.files if file.name in named])


def most_tokens(limit: Limit | None, split: Split) -> int | None:
    """Return how many tokens of a split a limit leaves; None is all of them.

    Steps need whole sequences, and the end of a shard holds none.
    """
    if limit is None or limit.steps is None or split == HELD_OUT:
        return max_tokens(limit)[split]
    per_shard = tokenizing.SHARD_TOKENS // limit.max_seq_len
    if not per_shard:  # no limit gives a sequence that a shard cannot hold
        return None
    shards, more = divmod(limit.sequences, per_shard)
    return shards * tokenizing.SHARD_TOKENS + more * limit.max_seq_len


def _train_tokenizer(
    text: Text,
    train: list[Source],
    location: DataCorpus,
    target: Path,
    options: FetchOptions,
    read: dict[str, Source],
) -> CorpusTokenizer:
    warnings = []
    with _bar(options, train) as bar:
        texts = _first(_pieces(train, bar, read), str(text.root), warnings)
        tokenizer = tokenizing.train_tokenizer(texts, location.vocab_size, str(text.root))
    tokenizing.save_tokenizer(tokenizer, target)
    end = tokenizer.token_to_id(tokenizing.END)
    return CorpusTokenizer(tokenizer, end, location.vocab_size, {}, tuple(warnings))


def _first(pieces: Iterable[Piece], where: str, warnings: list[str]) -> Iterator[str]:
    """Yield about the first TRAINED_CHARACTERS; with a warning if there are more."""
    characters = 0
    for piece in pieces:
        if characters >= TRAINED_CHARACTERS:
            warnings.append(f"{where}: the first {characters:,} characters trained the tokenizer")
            return
        characters += len(piece.text)
        yield piece.text


def _pieces(files: Iterable[Source], bar: Progress, read: dict[str, Source]) -> Iterator[Piece]:
    """Yield the documents of these files, one file after the other; note which were opened."""
    for file in files:
        read[file.name] = file
        yield from file.pieces(bar)


def _bar(options: FetchOptions, files: list[Source]) -> Progress:
    return options.progress(total=sum(file.size for file in files), unit="byte")
