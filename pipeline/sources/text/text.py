"""`data_location.Text`: documents of files anywhere, tokenized here.

Files of this machine are read in place; others are fetched into the store, where they are verified,
resumed and never fetched twice: whole, or of parquet as many row groups as a limit needs. An end
token follows each document, as in `Corpus`.

A document is held out if its SHA-256 is below `held_out_percent` of all there could be. So the same
text is always on the same side, and more data never moves it. A limit of files is on all files. One
of tokens or steps fetches no more than it needs; the rest of what was fetched last is read for
documents to hold out, at most HELD_OUT_TOKENS.
"""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import tokenizers

from pipeline.errors import LockstepError, brief, hide
from pipeline.net import hub_files, remote
from pipeline.runfile import Network
from pipeline.runfile.data import DataText, ShuffleDontShuffle
from pipeline.runfile.serde_enum import variant_name
from pipeline.sources import HELD_OUT, TOKENIZER, TRAIN, Fetched, FetchOptions, Survey, SurveyedFile
from pipeline.sources.choice import max_tokens
from pipeline.sources.corpus import TRAINED_CHARACTERS, most_tokens
from pipeline.sources.gcs import list_bucket
from pipeline.sources.http import files_at
from pipeline.sources.hub import REPO_ID, list_dataset
from pipeline.sources.listing import Listing, LocationFile, check_local, local_file, remembered
from pipeline.sources.text import far_parquet, given_tokenizer, subset, tokenizing
from pipeline.sources.text.document_files import ENDINGS, PARQUET, documents, of_row_groups
from pipeline.sources.text.documents import PIECE, Piece, cut
from pipeline.sources.text.given_tokenizer import CorpusTokenizer
from pipeline.sources.token_files import fetch_files
from pipeline.sources.url import list_files
from pipeline.stage.artifacts import listing_sha256, sha256_file
from pipeline.stage.given_files import expand, unchanged, walk
from pipeline.tokens.shards import Split

log = logging.getLogger(__name__)

MAKES_TOKENS = True
EVERYTHING = DataText.model_fields["files"].default
HASHES = 2**64  # of documents, by the first 8 bytes of a SHA-256


def survey(location: DataText, options: FetchOptions) -> Survey:
    """Describe the files that would be read; which documents are held out only reading tells.

    Raises:
      LockstepError: see `fetch`, except for what only the documents tell.
    """
    listing = _list(location, options)
    most = None if options.limit is None else options.limit.files
    files = tuple(
        SurveyedFile(file.name, TRAIN, file.origin.size, None) for file in listing.files[:most]
    )
    return Survey(listing.read, files, len(listing.files))


def fetch(location: DataText, folder: Path, options: FetchOptions) -> Fetched:
    """Tokenize the documents that a run file names.

    Raises:
      LockstepError: the location cannot be read or has no such files; a file is damaged or has no
        such column; a split has no documents; or there is no such tokenizer.
    """
    listing = _list(location, options)
    text = _Text(location, listing, options)
    encoder = _encoder(location, text, folder / TOKENIZER, options)
    size = 2 if encoder.vocab_size <= 2**16 else 4
    most = {TRAIN: most_tokens(options.limit, TRAIN), HELD_OUT: max_tokens(options.limit)[HELD_OUT]}
    shards = {
        split: tokenizing.SplitWriter(folder, split, size, most[split])
        for split in (TRAIN, HELD_OUT)
    }
    splits: deque[Split] = deque()  # of the pieces that are being encoded
    counts: Counter[str] = Counter()

    def pieces() -> Iterator[Piece]:
        for split, document in text.documents():
            if shards[TRAIN].is_full:
                text.enough = True
                if shards[HELD_OUT].is_full:
                    return
                if split == TRAIN:
                    continue
            counts[split] += 1
            for piece in cut(document[at : at + PIECE] for at in range(0, len(document), PIECE)):
                splits.append(split)
                yield piece

    for tokens_T in tokenizing.encode(encoder.tokenizer, encoder.end, pieces()):
        shards[splits.popleft()].add(tokens_T)
    files = [file for writer in shards.values() for file in writer.close()]
    for split, writer in shards.items():
        if not writer.files:
            raise LockstepError(
                f"{listing.read}: found {counts.total():,} documents and none of them in the "
                f"{split} split, expected some; held_out_percent is {location.held_out_percent:g}"
            )
    contents = [*text.read.items()]
    if encoder.source:
        contents.append((TOKENIZER, encoder.source["tokenizer"]["sha256"]))
    return Fetched(
        files=tuple(files),
        token_size_in_bytes=size,
        vocab_size=encoder.vocab_size,
        shuffle=location.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": [*text.read],
            "documents": {split: counts[split] for split in (TRAIN, HELD_OUT)},
            "left_out": {why: count for why, count in text.left_out.items() if count},
            "sha256": listing_sha256(contents),
            "tokenizers": tokenizers.__version__,
            **encoder.source,
        },
        unproven=tuple(text.unproven),
        warnings=(*text.warnings(), *encoder.warnings),
    )


def is_held_out(document: str, percent: float) -> bool:
    """Return whether a document is held out: u(SHA-256) < percent / 100, u from 0 to 1."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * HASHES


class _Text:
    """The documents of a listing's files, each file fetched when it is reached.

    Attributes:
      read: SHA-256 of each file that was read to its end or in part, by name.
      left_out: how many were left out, by reason.
      enough: whether no further file is needed.
      unproven: SHA-256 of what was fetched and no checksum of a server covers.
    """

    def __init__(self, location: DataText, listing: Listing, options: FetchOptions):
        self.location, self.listing, self.options = location, listing, options
        self.read: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.left_out: Counter[str] = Counter()
        self.unproven: dict[str, None] = {}
        self.enough = False

    def documents(self) -> Iterator[tuple[Split, str]]:
        """Yield every document with its split, in the order of the files."""
        self.left_out.clear()
        limit, percent = self.options.limit, self.location.held_out_percent
        files = self.listing.files[: None if limit is None else limit.files]
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
                    yield HELD_OUT if is_held_out(text, percent) else TRAIN, text
                continue
            for file, stored in zip(some, fetch_files(some, self.options), strict=True):
                with unchanged([stored.path]):
                    self._note(file, file.origin.size, stored.sha256 or sha256_file(stored.path))
                    column = self.location.column
                    for text in documents(stored.path, file.label, column, self.left_out):
                        yield HELD_OUT if is_held_out(text, percent) else TRAIN, text

    def _of_parts(self, file: LocationFile) -> Iterator[str]:
        """Yield the documents of a parquet file elsewhere; no more of it is fetched than needed."""
        for part in far_parquet.parts(file, self.options):
            self._note(file, part.size, part.sha256)
            column = self.location.column
            yield from of_row_groups(part.file, part.groups, file.label, column, self.left_out)
            if self.enough:
                return

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
    location: DataText, text: _Text, target: Path, options: FetchOptions
) -> CorpusTokenizer:
    if location.tokenizer is not None:
        return given_tokenizer.copy_tokenizer(location, target, options)
    warnings: list[str] = []

    def first() -> Iterator[str]:
        characters = 0
        for split, document in text.documents():
            if split == TRAIN:
                if characters >= TRAINED_CHARACTERS:
                    warnings.append(
                        f"{text.listing.read}: the first {characters:,} characters trained the "
                        "tokenizer"
                    )
                    return
                characters += len(document)
                yield from (piece.text for piece in cut([document]))

    where = variant_name(location)
    tokenizer = tokenizing.train_tokenizer(
        first(), location.vocab_size, text.listing.read, f"{where}.vocab_size"
    )
    tokenizing.save_tokenizer(tokenizer, target)
    end = tokenizer.token_to_id(tokenizing.END)
    return CorpusTokenizer(tokenizer, end, location.vocab_size, {}, tuple(warnings))


# ---- Which files ----


def _list(location: DataText, options: FetchOptions) -> Listing:
    """Return the files of text, by name; offline, those of the last time."""
    where = variant_name(location)
    root = expand(location.source, where)
    if root.exists():
        _refuse_of_hub(location, where)
        listing = _local(location, root)
    else:
        listing = remembered(location, options, lambda: _ask(location, options.network))
    if not listing.files:
        raise LockstepError(
            f"{listing.read}: found no file that fits {', '.join(location.files)} and ends in "
            f"{', '.join(ENDINGS)}"
        )
    return listing


def _local(location: DataText, root: Path) -> Listing:
    if root.is_file():
        return _listing(location, [local_file(root, root.parent)])
    files = [local_file(path, root) for _, path in walk(root, hidden=False)]
    return check_local(_listing(location, files), root)


def _ask(location: DataText, network: Network) -> Listing:
    where, source = variant_name(location), location.source.strip()
    scheme, is_address, rest = source.partition("://")
    if not is_address and REPO_ID.fullmatch(source):
        commit, files = list_dataset(source, location.revision, f"{where}: {source}", network)
        if location.revision != commit:
            advice = hub_files.pin_advice(f"{where}: {source}", commit, "revision")
            log.warning(f"download: warning: {advice}")
        says = {"repo_id": source, "commit": commit}
        if location.subset is not None:
            says |= {"subset": location.subset, "split": location.split}
            files = _of_subset(location, files, f"{where}: {source}", network)
        elif location.files == EVERYTHING:
            _warn_of_subsets(files, f"{where}: {source}", network)
        return _listing(location, files, says, " on the hub")
    if not is_address:
        raise LockstepError(
            f"{where}: found no {Path(source).absolute()}, expected a file or folder, an address, "
            "or owner/name of a dataset on the hub"
        )
    _refuse_of_hub(location, where)
    if scheme in ("http", "https"):
        return _listing(location, files_at([source], network))
    if scheme in ("gs", "gcs"):
        bucket, _, folder = rest.partition("/")
        return _listing(location, list_bucket(bucket, folder, network))
    return _listing(location, list_files(source, scheme, network))


def _listing(
    location: DataText,
    files: Iterable[LocationFile],
    says: dict[str, str] | None = None,
    on: str = "",
) -> Listing:
    def fits(name: str) -> bool:
        hidden = any(part.startswith(".") for part in name.split("/"))
        wanted = any(fnmatch(name, pattern) for pattern in location.files)
        return wanted and not hidden and name.lower().endswith(ENDINGS)

    return Listing(
        read=hide(location.source.strip()) + on,
        token_size_in_bytes="FourBytes",
        shuffle=ShuffleDontShuffle(),
        files=tuple(file for file in sorted(files, key=lambda file: file.name) if fits(file.name)),
        says=says or {},
    )


def _of_subset(
    location: DataText, files: Iterable[LocationFile], where: str, network: Network
) -> list[LocationFile]:
    readme = _readme(files)
    if readme is None or readme.origin.size > subset.MOST_BYTES:
        found = "none" if readme is None else f"one of {readme.origin.size} bytes"
        raise LockstepError(
            f"{where}: README.md: found {found}, expected one of at most {subset.MOST_BYTES} bytes "
            f"with subset {location.subset!r}"
        )
    content = b"".join(remote.read(readme.origin, 0, readme.origin.size, network))
    given = (location.subset, location.split)
    wanted = subset.patterns(content, *given, f"{where}: README.md")
    return [file for file in files if any(fnmatch(file.name, pattern) for pattern in wanted)]


def _warn_of_subsets(files: Iterable[LocationFile], where: str, network: Network) -> None:
    """Say that all subsets of a dataset are read, where its README.md lists several."""
    readme = _readme(files)
    if readme is None or readme.origin.size > subset.MOST_BYTES:
        return
    content = b"".join(remote.read(readme.origin, 0, readme.origin.size, network))
    try:
        listed = subset.names(content, f"{where}: README.md")
    except LockstepError:
        return  # nobody asked for a subset of it
    if len(listed) > 1:
        log.warning(
            f"download: warning: {where}: all files are read, of the subsets "
            f"{brief(', '.join(listed), 200)}; set subset to read one of them"
        )


def _readme(files: Iterable[LocationFile]) -> LocationFile | None:
    return next((file for file in files if file.name == subset.README), None)


def _refuse_of_hub(location: DataText, where: str) -> None:
    for key in ("revision", "subset"):
        if (value := getattr(location, key)) is not None:
            raise LockstepError(
                f"{where}.{key} is {value!r}, expected none: {hide(location.source)} is not a "
                "dataset on the hub"
            )
