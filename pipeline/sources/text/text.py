"""`data_location.Text` and `WeightedText`: documents of files anywhere, tokenized here.

Files of this machine are read in place; others are fetched into the store, where they are verified,
resumed and never fetched twice: whole, or of parquet as many row groups as a limit needs.

A document is held out if its SHA-256 is below `held_out_percent` of all there could be. So the same
text is always on the same side, and more data never moves it. All of a file are that is named as a
train file of the source but for the word of its split, as test.jsonl beside train.jsonl is.

With `most_seen_percent`, a held-out document that stands in the train split is left out.

A limit of files is on all files of a source. One of tokens or steps is divided among the sources by
their weights, and fetches no more than it needs; the rest of what was fetched last is read for
documents to hold out, at most HELD_OUT_TOKENS. Sequences of several sources are mixed while they
are read (tokens/mixture.py).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lockstep.files import sha256_file
from lockstep.tables.variant import variant_name
from pipeline.runfile.data import DataText, DataWeightedText, Limit, ShuffleDontShuffle, TextSource
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.sources.text.documents import (
    PACKED,
    PARQUET,
    RowGroups,
    documents,
    fetched_parts,
    parquet_text_bytes,
)
from pipeline.sources.text.text_files import files_of
from pipeline.sources.text.tokenizing import DocumentReader, most_tokens, tokenize
from pipeline.sources.token_files.fetching import fetch_files
from pipeline.sources.token_files.listing import Listing, LocationFile, first_far, max_tokens
from pipeline.stage.untrusted_files import unchanged
from pipeline.tokens import signs
from pipeline.tokens.shards import Part, Split

AnyText: TypeAlias = DataText | DataWeightedText
HASH_RANGE = 2**64  # of documents, by the first 8 bytes of a SHA-256


def survey(location: AnyText, options: FetchOptions) -> Survey:
    """Describe the text files to read; only reading tells which documents are held out."""
    sources = _sources(location)
    listings = [files_of(source.source, source.where, options) for source in sources]
    most = None if options.limit is None else options.limit.files
    files = tuple(
        SurveyedFile(file.name, HELD_OUT if file.name in named else TRAIN, file.origin.size, None)
        for listing in listings
        for named in [signs.held_out_beside(file.name for file in listing.files)]
        for file in listing.files[:most]
    )
    return Survey(
        read=" and ".join(listing.read for listing in listings),
        files=files,
        train_files=sum(len(listing.files) for listing in listings),
        first=first_far(file for listing in listings for file in listing.files[:most]),
        text_bytes=_train_bytes(location, sources, listings, options),
    )


def _train_bytes(
    location: AnyText, sources: "list[_Source]", listings: list[Listing], options: FetchOptions
) -> int | None:
    """Return about how many bytes of text there are to train on; None if only reading tells.

    Only reading tells it of files that are compressed as a whole. The first parquet file of a
    source says how much text is in a byte of its parquet files.
    """
    most, text = None if options.limit is None else options.limit.files, 0
    for source, listing in zip(sources, listings, strict=True):
        files = listing.files[:most]
        parquet = [file for file in files if file.name.lower().endswith(PARQUET)]
        plain = [file for file in files if not file.name.lower().endswith(PACKED)]
        if len(parquet) + len(plain) < len(files):
            return None
        text += sum(file.origin.size for file in plain)
        if parquet:
            first = parquet_text_bytes(parquet[0], source.source.column, options)
            share = first / max(1, parquet[0].origin.size)
            text += round(share * sum(file.origin.size for file in parquet))
    return round(text * (1 - location.held_out_percent / 100))


def fetch(location: AnyText, folder: Path, options: FetchOptions) -> Fetched:
    """Tokenize the documents that a run file names.

    Raises:
      LockstepError: a source cannot be read or has no such files; a file is damaged or has no such
        column; a split has no documents; or there is no such tokenizer.
    """
    readers = [_FileReader(location, source, options) for source in _sources(location)]
    weights = [reader.source.weight for reader in readers if reader.source.weight is not None]
    parts = tuple(Part(shuffle=ShuffleDontShuffle(), weight=weight) for weight in weights)
    fetched = tokenize(location, readers, folder, options, parts)
    unproven = tuple(dict.fromkeys(sha256 for reader in readers for sha256 in reader.unproven))
    return fetched.model_copy(update={"unproven": unproven})


def is_held_out(document: str, percent: float) -> bool:
    """Return whether a document is held out: u(SHA-256) < percent / 100, u from 0 to 1."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * HASH_RANGE


class _Source(NamedTuple):
    """A source of text that a run file names, its key there, and its part of a limit."""

    source: TextSource
    where: str
    part: int = 0
    share: float = 1.0
    weight: float | None = None

    def limit(self, total: Limit | None) -> Limit | None:
        """Return a text source's part of a limit, rounded up: all together reach the total."""
        if total is None or total.files is not None or self.share == 1:
            return total
        if total.tokens is not None:
            return Limit(tokens=math.ceil(total.tokens * self.share))
        sequences = math.ceil(total.sequences * self.share) + 1  # mixture.py rounds too
        return Limit(steps=sequences, batch=1, max_seq_len=total.max_seq_len)


def _sources(location: AnyText) -> list[_Source]:
    where = variant_name(location)
    if isinstance(location, DataText):
        return [_Source(location, where)]
    total = sum(source.weight for source in location.sources)
    return [
        _Source(source, f"{where}.sources[{n}]", n, source.weight / total, source.weight)
        for n, source in enumerate(location.sources)
    ]


class _FileReader(DocumentReader):
    """The documents of a source's files, each file fetched when it is reached.

    Attributes:
      opened: SHA-256 of each file that was read to its end or in part, by name.
      left_out: how many documents were left out, by reason.
      named: files whose documents are all held out, since their names say so.
      unproven: SHA-256 of what was fetched and no checksum of a server covers.
    """

    def __init__(self, location: AnyText, source: _Source, options: FetchOptions):
        self.source, self.part, self.share = source, source.part, source.share
        self.percent = location.held_out_percent
        self.options = replace(options, limit=source.limit(options.limit))
        most = max_tokens(options.limit)[HELD_OUT]
        super().__init__(
            {
                TRAIN: most_tokens(self.options.limit, TRAIN),
                HELD_OUT: None if most is None else math.ceil(most * source.share),
            }
        )
        self._listing = files_of(source.source, source.where, options)
        self.read = self._listing.read
        self.opened: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.left_out: Counter[str] = Counter()
        self.unproven: dict[str, None] = {}
        self.named = signs.held_out_beside(file.name for file in self._listing.files)

    def documents(self) -> Iterator[tuple[Split, str]]:
        self.left_out.clear()
        limit = self.options.limit
        files = self._listing.files[: None if limit is None else limit.files]
        # first what is trained on: a limit may need no more
        files = sorted(files, key=lambda file: file.name in self.named)
        # where only tokenizing tells how much is needed, each file is fetched as it is reached
        as_needed = limit is not None and limit.files is None
        at_once = 1 if as_needed else self.options.network.connections
        for first in range(0, len(files), at_once):
            if self.enough:
                return
            batch = files[first : first + at_once]
            is_parquet = batch[0].name.lower().endswith(PARQUET)
            if as_needed and is_parquet and not batch[0].origin.is_local:
                yield from self._of_parts(batch[0])
                continue
            for file, stored in zip(batch, fetch_files(batch, self.options), strict=True):
                with unchanged([stored.path]):
                    self._note(file, file.origin.size, stored.sha256 or sha256_file(stored.path))
                    yield from self._of_file(file, stored.path)

    def _of_file(
        self, file: LocationFile, path: Path, groups: RowGroups | None = None
    ) -> Iterator[tuple[Split, str]]:
        column, alone = self.source.source.column, len(self._listing.files) == 1
        of_file = documents(path, file.label, column, self.left_out, alone=alone, groups=groups)
        for text in of_file:
            held_out = file.name in self.named or is_held_out(text, self.percent)
            yield HELD_OUT if held_out else TRAIN, text

    def _of_parts(self, file: LocationFile) -> Iterator[tuple[Split, str]]:
        """Yield the documents of a remote parquet file, and fetch no more of it than needed."""
        for part in fetched_parts(file, self.options):
            self._note(file, part.size, part.sha256)
            yield from self._of_file(file, part.path, part.groups)
            if self.enough:
                return

    def contents(self) -> Iterator[tuple[str, str]]:
        # by name, after the number of the source among several
        prefix = "" if self.source.weight is None else f"{self.part}/"
        for name, sha256 in self.opened.items():
            yield f"{prefix}{name}", sha256

    def record(self) -> dict[str, Any]:
        return {
            **({"read": self.read} if self.source.weight else {}),
            **self._listing.says,
            "files": [*self.opened],
            **({"held_out_files": sorted(self.named)} if self.named else {}),
            "documents": {
                TRAIN: self.counts[TRAIN],
                HELD_OUT: self.counts[HELD_OUT] - len(self.repeated),
            },
            **({"seen_in_train": len(self.repeated)} if self.repeated else {}),
            "left_out": {why: count for why, count in self.left_out.items() if count},
        }

    def warnings(self) -> list[str]:
        reasons = [f"{count:,} {why}" for why, count in sorted(self.left_out.items()) if count]
        return [f"{self.read}: left out {', '.join(reasons)}"] if reasons else []

    def _note(self, file: LocationFile, size: int, sha256: str) -> None:
        """Note what was read of a text file: the longest part, if more was read for a tokenizer."""
        if size >= self._sizes.get(file.name, 0):
            self.opened[file.name], self._sizes[file.name] = sha256, size
        is_proven = size == file.origin.size and file.origin.checksum is not None
        if not file.origin.is_local and not is_proven:
            self.unproven[sha256] = None


PROVIDER = Provider(survey, fetch)
