"""`data_location.Text` and `WeightedText`: documents of files anywhere, tokenized here.

Files of this machine are read in place; others are fetched into the store, where they are verified,
resumed and never fetched twice: whole, or of parquet as many row groups as a limit needs. An end
token follows each document, as in `Corpus`.

A document is held out if its SHA-256 is below `held_out_percent` of all there could be. So the same
text is always on the same side, and more data never moves it. All of a file are that is named as a
train file of the source but for the word of its split, as test.jsonl beside train.jsonl is.

A limit of files is on all files of a
source. One of tokens or steps is divided among the sources by their weights, and fetches no more
than it needs; the rest of what was fetched last is read for documents to hold out, at most
HELD_OUT_TOKENS. Sequences of several sources are mixed while they are read (tokens/mixture.py).
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tokenizers

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from lockstep.tables.variant import variant_name
from pipeline.runfile.data import (
    DataText,
    DataWeightedText,
    Limit,
    ShuffleDontShuffle,
    TextSource,
)
from pipeline.sources import (
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Fetched,
    FetchOptions,
    Survey,
    SurveyedFile,
)
from pipeline.sources.choice import first_far, max_tokens
from pipeline.sources.corpus import TRAINED_CHARACTERS, most_tokens
from pipeline.sources.listing import LocationFile
from pipeline.sources.text import far_parquet, given_tokenizer, tokenizing
from pipeline.sources.text.document_files import PARQUET, PLAIN, documents, of_row_groups
from pipeline.sources.text.documents import PIECE, Piece, cut, saying
from pipeline.sources.text.given_tokenizer import CorpusTokenizer
from pipeline.sources.text.text_sources import files_of
from pipeline.sources.token_files import fetch_files
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import unchanged
from pipeline.tokens import signs
from pipeline.tokens.shards import Part, ShardFile, Split

AnyText: TypeAlias = DataText | DataWeightedText
MAKES_TOKENS = True
HASHES = 2**64  # of documents, by the first 8 bytes of a SHA-256


def survey(location: AnyText, options: FetchOptions) -> Survey:
    """Describe the files that would be read; which documents are held out only reading tells.

    Raises:
      LockstepError: see `fetch`, except for what only the documents tell.
    """
    given = _given(location)
    listings = [files_of(one.source, one.where, options) for one in given]
    most = None if options.limit is None else options.limit.files
    files = tuple(
        SurveyedFile(file.name, HELD_OUT if file.name in named else TRAIN, file.origin.size, None)
        for listing in listings
        for named in [signs.held_out_beside(file.name for file in listing.files)]
        for file in listing.files[:most]
    )
    whole = sum(len(listing.files) for listing in listings)
    read = " and ".join(listing.read for listing in listings)
    first = first_far(file for listing in listings for file in listing.files[:most])
    found = [
        _text_bytes(listing.files[:most], one.source.column, options)
        for one, listing in zip(given, listings, strict=True)
    ]
    known = [nbytes for nbytes in found if nbytes is not None]
    trained = round(sum(known) * (1 - location.held_out_percent / 100))
    text_bytes = trained if len(known) == len(found) else None
    return Survey(read, files, whole, first=first, text_bytes=text_bytes)


def _text_bytes(files: Sequence[LocationFile], column: str, options: FetchOptions) -> int | None:
    """Return the bytes of text of a source's files, about; None if some are compressed whole.

    The first parquet file says how much text is in a byte of all of them.
    """
    packed = [file for file in files if file.name.lower().endswith(PARQUET)]
    plain = [file for file in files if file.name.lower().endswith(PLAIN)]
    if len(packed) + len(plain) < len(files):
        return None
    text = sum(file.origin.size for file in plain)
    if packed:
        share = far_parquet.text_bytes(packed[0], column, options) / max(1, packed[0].origin.size)
        text += round(share * sum(file.origin.size for file in packed))
    return text


def fetch(location: AnyText, folder: Path, options: FetchOptions) -> Fetched:
    """Tokenize the documents that a run file names.

    Raises:
      LockstepError: a source cannot be read or has no such files; a file is damaged or has no such
        column; a split has no documents; or there is no such tokenizer.
    """
    texts = [_Text(location, one, options) for one in _given(location)]
    with saying(lambda: (line for text in texts for line in text.warnings())):
        return _fetch(location, texts, folder, options)


def _fetch(
    location: AnyText, texts: "Sequence[_Text]", folder: Path, options: FetchOptions
) -> Fetched:
    encoder = _encoder(location, texts, folder / TOKENIZER, options)
    size = 2 if encoder.vocab_size <= 2**16 else 4
    files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
    for number, text in enumerate(texts):
        text.writers = {
            split: tokenizing.SplitWriter(folder, split, size, most, files[split], number)
            for split, most in text.most.items()
        }
    coming: deque[tokenizing.SplitWriter] = deque()  # of the pieces that are being encoded

    def pieces() -> Iterator[Piece]:
        for text in texts:
            for writer, piece in text.pieces():
                coming.append(writer)
                yield piece

    for tokens_T in tokenizing.encode(encoder.tokenizer, encoder.end, pieces()):
        coming.popleft().add(tokens_T)
    for text in texts:
        text.close()
    read = _read(texts)
    if not files[HELD_OUT]:
        raise _none_in(HELD_OUT, read, sum((text.counts for text in texts), Counter()), location)
    weights = [text.given.weight for text in texts if text.given.weight is not None]
    said = [text.source() for text in texts]
    contents = [content for text in texts for content in text.contents()]
    if encoder.source:
        contents.append((TOKENIZER, encoder.source["tokenizer"]["sha256"]))
    return Fetched(
        files=(*files[TRAIN], *files[HELD_OUT]),
        token_size_in_bytes=size,
        vocab_size=encoder.vocab_size,
        shuffle=location.shuffle,
        parts=tuple(Part(shuffle=ShuffleDontShuffle(), weight=weight) for weight in weights),
        source={
            "read": read,
            **({"sources": said} if weights else said[0]),
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
            **encoder.source,
        },
        unproven=tuple(dict.fromkeys(sha256 for text in texts for sha256 in text.unproven)),
        warnings=(*(line for text in texts for line in text.warnings()), *encoder.warnings),
    )


def _none_in(split: Split, read: str, counts: Counter[str], location: AnyText) -> LockstepError:
    return LockstepError(
        f"{read}: found {counts.total():,} documents and none of them in the {split} split, "
        f"expected some; held_out_percent is {location.held_out_percent:g}"
    )


def _read(texts: "Sequence[_Text]") -> str:
    """What errors and records call sources."""
    return " and ".join(text.listing.read for text in texts)


def is_held_out(document: str, percent: float) -> bool:
    """Return whether a document is held out: u(SHA-256) < percent / 100, u from 0 to 1."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * HASHES


class _Given(NamedTuple):
    """A source of text that a run file names, where it does, and its part of a limit."""

    source: TextSource
    where: str
    share: float = 1.0
    weight: float | None = None
    prefix: str = ""

    def limit(self, whole: Limit | None) -> Limit | None:
        """Return its part of a limit; rounded up, so that all parts are no less than the whole."""
        if whole is None or whole.files is not None or self.share == 1:
            return whole
        if whole.tokens is not None:
            return Limit(tokens=math.ceil(whole.tokens * self.share))
        sequences = math.ceil(whole.sequences * self.share) + 1  # mixture.py rounds too
        return Limit(steps=sequences, batch=1, max_seq_len=whole.max_seq_len)


def _given(location: AnyText) -> list[_Given]:
    where = variant_name(location)
    if isinstance(location, DataText):
        return [_Given(location, where)]
    total = sum(source.weight for source in location.sources)
    return [
        _Given(source, f"{where}.sources[{n}]", source.weight / total, source.weight, f"{n}/")
        for n, source in enumerate(location.sources)
    ]


class _Text:
    """The documents of a source's files, each file fetched when it is reached.

    Attributes:
      listing: the files.
      most: tokens at most of each split; None is all.
      writers: of the tokens of each split.
      counts: documents that were read, by split.
      read: SHA-256 of each file that was read to its end or in part, by name.
      left_out: how many were left out, by reason.
      named: files whose documents are all held out, since their names say so.
      enough: whether no further file is needed.
      unproven: SHA-256 of what was fetched and no checksum of a server covers.
    """

    def __init__(self, location: AnyText, given: _Given, options: FetchOptions):
        self.location, self.given = location, given
        self.options = replace(options, limit=given.limit(options.limit))
        self.listing = files_of(given.source, given.where, options)
        aside = max_tokens(options.limit)[HELD_OUT]
        self.most: dict[Split, int | None] = {
            TRAIN: most_tokens(self.options.limit, TRAIN),
            HELD_OUT: None if aside is None else math.ceil(aside * given.share),
        }
        self.writers: dict[Split, tokenizing.SplitWriter] = {}
        self.counts: Counter[str] = Counter()
        self.read: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.left_out: Counter[str] = Counter()
        self.unproven: dict[str, None] = {}
        self.named = signs.held_out_beside(file.name for file in self.listing.files)
        self.enough = False

    def _side(self, file: LocationFile, text: str) -> Split:
        held_out = file.name in self.named or is_held_out(text, self.location.held_out_percent)
        return HELD_OUT if held_out else TRAIN

    def documents(self) -> Iterator[tuple[Split, str]]:
        """Yield every document with its split, in the order of the files."""
        self.left_out.clear()
        limit = self.options.limit
        files = self.listing.files[: None if limit is None else limit.files]
        # first what is trained on: a limit may need no more
        files = sorted(files, key=lambda file: file.name in self.named)
        # where only tokenizing tells how much is needed, each file is fetched as it is reached
        as_needed = limit is not None and limit.files is None
        at_once = 1 if as_needed else self.options.network.connections
        for first in range(0, len(files), at_once):
            if self.enough:
                return
            some = files[first : first + at_once]
            is_parquet = some[0].name.lower().endswith(PARQUET)
            if as_needed and is_parquet and not some[0].origin.is_local:
                for text in self._of_parts(some[0]):
                    yield self._side(some[0], text), text
                continue
            for file, stored in zip(some, fetch_files(some, self.options), strict=True):
                with unchanged([stored.path]):
                    self._note(file, file.origin.size, stored.sha256 or sha256_file(stored.path))
                    column = self.given.source.column
                    for text in documents(stored.path, file.label, column, self.left_out):
                        yield self._side(file, text), text

    def _of_parts(self, file: LocationFile) -> Iterator[str]:
        """Yield the documents of a parquet file elsewhere; no more of it is fetched than needed."""
        for part in far_parquet.parts(file, self.options):
            self._note(file, part.size, part.sha256)
            column = self.given.source.column
            yield from of_row_groups(part.file, part.groups, file.label, column, self.left_out)
            if self.enough:
                return

    def pieces(self) -> Iterator[tuple[tokenizing.SplitWriter, Piece]]:
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
            for piece in cut(document[at : at + PIECE] for at in range(0, len(document), PIECE)):
                yield self.writers[split], piece

    def close(self) -> None:
        """Write what is left of the tokens.

        Raises:
          LockstepError: there are none to train on.
        """
        for split, writer in self.writers.items():
            writer.close()
            if split == TRAIN and not writer.has_written:
                raise _none_in(split, self.listing.read, self.counts, self.location)

    def contents(self) -> Iterator[tuple[str, str]]:
        """Yield each file's name, after the number of its source among several, and SHA-256."""
        for name, sha256 in self.read.items():
            yield f"{self.given.prefix}{name}", sha256

    def source(self) -> dict[str, Any]:
        """Return what shards.json has of it."""
        return {
            **({"read": self.listing.read} if self.given.weight else {}),
            **self.listing.says,
            "files": [*self.read],
            **({"held_out_files": sorted(self.named)} if self.named else {}),
            "documents": {split: self.counts[split] for split in (TRAIN, HELD_OUT)},
            "left_out": {why: count for why, count in self.left_out.items() if count},
        }

    def warnings(self) -> list[str]:
        """Return a line on what was left out, if something was."""
        found = [f"{count:,} {why}" for why, count in sorted(self.left_out.items()) if count]
        return [f"{self.listing.read}: left out {', '.join(found)}"] if found else []

    def _note(self, file: LocationFile, size: int, sha256: str) -> None:
        """Note what was read of a file: the most, if a tokenizer was trained on more of it."""
        if size >= self._sizes.get(file.name, 0):
            self.read[file.name], self._sizes[file.name] = sha256, size
        whole = size == file.origin.size and file.origin.checksum is not None
        if not file.origin.is_local and not whole:
            self.unproven[sha256] = None


def _encoder(
    location: AnyText, texts: Sequence[_Text], target: Path, options: FetchOptions
) -> CorpusTokenizer:
    if location.tokenizer is not None:
        return given_tokenizer.copy_tokenizer(location, target, options)
    warnings: list[str] = []

    def first(text: _Text) -> Iterator[str]:
        characters = 0
        for split, document in text.documents():
            if split == TRAIN:
                if characters >= TRAINED_CHARACTERS * text.given.share:
                    warnings.append(
                        f"{text.listing.read}: the first {characters:,} characters trained the "
                        "tokenizer"
                    )
                    return
                characters += len(document)
                yield from (piece.text for piece in cut([document]))

    where, read = variant_name(location), _read(texts)
    characters = (piece for text in texts for piece in first(text))
    tokenizer = tokenizing.train_tokenizer(
        characters, location.vocab_size, read, f"{where}.vocab_size"
    )
    tokenizing.save_tokenizer(tokenizer, target)
    end = tokenizer.token_to_id(tokenizing.END)
    return CorpusTokenizer(tokenizer, end, location.vocab_size, {}, tuple(warnings))
