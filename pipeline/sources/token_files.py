"""Token files of a listing: fetched, checked and put in place.

They hold tokens alone: no header is parsed, not even of a .npy (one that has a header is rejected;
Psyche would train on it).
"""

import codecs
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import LockstepError, brief
from pipeline.net import store
from pipeline.net.remote import Origin
from pipeline.net.store import Stored, Transfer
from pipeline.net.web import PIECE_BYTES
from pipeline.sources import HELD_OUT, TOKENIZER, TRAIN, Fetched, FetchOptions
from pipeline.sources.choice import ChosenFile, choose, is_by_default
from pipeline.sources.listing import Listing, LocationFile
from pipeline.stage import artifacts
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.ids import check_file_ids
from pipeline.tokens.shards import ShardFile, shard_path
from pipeline.tokens.tokenizer_files import MOST_BYTES, convert_older, load_tokenizer, vocab_size

HEAD_BYTES, TEXT_BYTES = 512, 32  # bytes that are checked for text; tokens may look like so much
NUMPY_MAGIC = b"\x93NUMPY"


def fetch(listing: Listing, folder: Path, options: FetchOptions) -> Fetched:
    """Fetch what a run reads of a listing, check it, and put it in place.

    Raises:
      LockstepError: a file cannot be fetched, does not hold tokens, or has an invalid id.
    """
    chosen, warnings = choose(listing, options)
    vocab = fetch_tokenizer(listing, folder, options)
    if options.stream:
        _check_versions(listing)
        files = [_shard(one, path, None) for one, path in _shard_paths(chosen)]
        versions = [(file.name, _version(file.origin)) for file in files]
    else:
        files = _fetch_files(listing, chosen, vocab, folder, options)
        versions = [(file.name, file.sha256) for file in files]
    names = {
        split: [one.file.name for one in chosen if one.split == split]
        for split in (TRAIN, HELD_OUT)
    }
    return Fetched(
        files=tuple(files),
        token_size_in_bytes=listing.size,
        vocab_size=vocab,
        shuffle=listing.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": names,
            "sha256": listing_sha256(versions),
        },
        parts=listing.parts,
        held_out_by_default=is_by_default(listing, options.limit),
        unproven=tuple(
            file.sha256
            for file, one in zip(files, chosen, strict=True)
            if file.is_here and _is_unproven(one, listing.size)
        ),
        warnings=warnings,
    )


def fetch_files(
    files: Sequence[LocationFile], options: FetchOptions, sizes: Sequence[int] | None = None
) -> list[Stored]:
    """Fetch files, or their first bytes, into the store, behind a bar."""
    sizes = [file.origin.size for file in files] if sizes is None else sizes
    transfers = [
        Transfer(file.label, file.origin, size) for file, size in zip(files, sizes, strict=True)
    ]
    with options.progress(total=sum(sizes), unit="byte") as bar:
        return store.fetch(transfers, options.store, options.network, bar)


def fetch_tokenizer(listing: Listing, folder: Path, options: FetchOptions) -> int | None:
    """Put the tokenizer's files in place; return the size of its vocabulary, None without one.

    Raises:
      LockstepError: see `store.fetch`; or a file is too large, or not a tokenizer.
    """
    if not listing.tokenizer:
        return None
    for file in listing.tokenizer:
        if file.origin.size > MOST_BYTES:
            raise LockstepError(
                f"{file.label}: {file.origin.size} bytes, expected at most {MOST_BYTES} of a "
                "tokenizer"
            )
    (folder / TOKENIZER).mkdir()
    fetched = fetch_files(listing.tokenizer, options)
    for file, stored in zip(listing.tokenizer, fetched, strict=True):
        path = folder / TOKENIZER / file.name
        _place(stored, path, file.origin, file.origin.size)
    convert_older(folder / TOKENIZER, f"the tokenizer of {listing.read}")
    labels = {file.name: file.label for file in listing.tokenizer}
    path = folder / TOKENIZER / "tokenizer.json"
    return vocab_size(load_tokenizer(path, labels.get(path.name)))


def _is_unproven(one: ChosenFile, size: int) -> bool:
    """Return whether no checksum covers the bytes: the server gave none, or a part was read."""
    origin = one.file.origin
    return origin.checksum is None or one.tokens * size < origin.size


def _check_versions(listing: Listing) -> None:
    """Check that the files can be read in parts, each of the version that was listed."""
    for file in listing.files:
        if file.origin.tag is None and not file.origin.is_addressed:
            raise LockstepError(
                f"{file.label}: the server names no version of it, neither an ETag nor a date, "
                "expected one with [download] stream: a part may be of another version"
            )


def _shard_paths(chosen: list[ChosenFile]) -> Iterator[tuple[ChosenFile, str]]:
    """Yield each file with its path in the shards folder: its number in its split."""
    counts = dict.fromkeys((TRAIN, HELD_OUT), 0)
    for one in chosen:
        yield one, shard_path(one.split, counts[one.split])
        counts[one.split] += 1


def _shard(one: ChosenFile, path: str, sha256: str | None) -> ShardFile:
    return ShardFile(
        path=path,
        split=one.split,
        tokens=one.tokens,
        sha256=sha256,
        name=one.file.name,
        part=one.file.part,
        origin=one.file.origin if sha256 is None else None,
    )


def _version(origin: Origin) -> str:
    """Return a hash of size and version, in place of the SHA-256 of a file not read yet."""
    return hashlib.sha256(f"{origin.size} {origin.tag} {origin.checksum}".encode()).hexdigest()


def _fetch_files(
    listing: Listing,
    chosen: list[ChosenFile],
    vocab: int | None,
    folder: Path,
    options: FetchOptions,
) -> list[ShardFile]:
    for split in (TRAIN, HELD_OUT):
        (folder / split).mkdir()
    sizes = [one.tokens * listing.size for one in chosen]
    fetched = fetch_files([one.file for one in chosen], options, sizes)
    files = []
    with options.progress(total=len(chosen), unit="file") as bar:
        for (one, path), size, stored in zip(_shard_paths(chosen), sizes, fetched, strict=True):
            sha256 = _place(stored, folder / path, one.file.origin, size)
            _check_tokens(folder / path, listing.size, vocab, one.file.label)
            files.append(_shard(one, path, sha256))
            bar.advance()
    return files


def _place(stored: Stored, target: Path, origin: Origin, size: int) -> str:
    """Link to the store; copy a file that may change, or that is longer than needed.

    Return the SHA-256 of what is in place now.
    """
    if stored.sha256 is not None and stored.path.stat().st_size == size:
        artifacts.link(stored.path, target)
        return stored.sha256
    digest, left = hashlib.sha256(), size
    with open(stored.path, "rb") as file, artifacts.written(target) as copy:
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            copy.write(piece)
            digest.update(piece)
            left -= len(piece)
    if left:
        raise LockstepError(
            f"{stored.path}: cut short while it was read, expected {size} bytes as before"
        )
    return digest.hexdigest()


def _check_tokens(path: Path, size: int, vocab: int | None, name: str) -> None:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NUMPY_MAGIC):
        raise LockstepError(
            f"{name}: found a NumPy header, expected tokens alone, as `tofile` writes them"
        )
    if text := _text(head):
        raise LockstepError(
            f"{name}: found text, {brief(repr(text))}, expected tokens; is it a page to sign in?"
        )
    check_file_ids(path, size, vocab, name)


def _text(head: bytes) -> str | None:
    """Return the beginning of a file as text if it is text: half of all tokens' bytes are not."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may be cut
    except UnicodeDecodeError:
        return None
    is_text = all(character.isprintable() or character.isspace() for character in text)
    return text if is_text and len(head) >= TEXT_BYTES else None
