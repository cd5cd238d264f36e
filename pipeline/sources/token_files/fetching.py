"""Token files of a listing: fetched, checked and put in place.

They hold tokens alone: no header is parsed, not even of a .npy. One that says of itself that it is
something else, or has tokens of another size, is rejected (signs.py); Psyche would train on it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import link, written
from pipeline.net import remote
from pipeline.net.origin import Origin
from pipeline.net.transfers import store
from pipeline.net.transfers.store import StoredFile, Transfer
from pipeline.net.web import PIECE_BYTES
from pipeline.runfile import Network
from pipeline.runfile.data import Data
from pipeline.sources.provider import (
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
)
from pipeline.sources.token_files.listing import (
    ChosenFile,
    Listing,
    LocationFile,
    choose,
    holds_out_by_default,
    remembered,
    survey_files,
)
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens import signs
from pipeline.tokens.ids import check_file_ids
from pipeline.tokens.shards import ShardFile, shard_path
from pipeline.tokens.tokenizer_files import MOST_BYTES, convert_older, load_tokenizer, vocab_size

SIZED_TOKENS = 2**16  # tokens that are looked at for their size


def provider(listing: Callable[[Any, Network], Listing], *, is_local: bool = False) -> Provider:
    """Return the provider of locations of token files, which `listing(location, network)` lists.

    Offline, the listing is that of the last time, but for files of this machine (`is_local`).
    """

    def look_up(location: Data, options: FetchOptions) -> Listing:
        if is_local:
            return listing(location, options.network)
        return remembered(location, options, lambda: listing(location, options.network))

    def survey(location: Data, options: FetchOptions) -> Survey:
        return survey_files(look_up(location, options), options)

    def fetch_listed(location: Data, folder: Path, options: FetchOptions) -> Fetched:
        return fetch(look_up(location, options), folder, options)

    return Provider(survey, fetch_listed, streams=True)


def fetch(listing: Listing, folder: Path, options: FetchOptions) -> Fetched:
    """Fetch what a run reads of a listing, check it, and put it in place."""
    chosen, warnings = choose(listing, options)
    warnings += _check_beside(listing, chosen, options)
    vocab = fetch_tokenizer(listing, folder, options)
    if options.stream:
        _check_versions(listing)
        for pick in {pick.split: pick for pick in reversed(chosen)}.values():  # the first of each
            stop = min(SIZED_TOKENS, pick.tokens) * listing.size
            beginning = b"".join(remote.read(pick.file.origin, 0, stop, options.network))
            _check_signs(beginning, listing.size, pick.file.label)
        files = [_shard(pick, path, None) for pick, path in _shard_paths(chosen)]
        versions = [(file.name, _version(file.origin)) for file in files]
    else:
        files = _fetch_files(listing, chosen, vocab, folder, options)
        versions = [(file.name, file.sha256) for file in files]
    names = {
        split: [pick.file.name for pick in chosen if pick.split == split]
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
        held_out_by_default=holds_out_by_default(listing, options.limit),
        unproven=tuple(
            file.sha256
            for file, origin in zip(files, (pick.file.origin for pick in chosen), strict=True)
            # no checksum covers the bytes: the server gave none, or a part was read
            if file.is_here
            and (origin.checksum is None or file.tokens * listing.size < origin.size)
        ),
        warnings=warnings,
    )


def fetch_files(
    files: Sequence[LocationFile], options: FetchOptions, sizes: Sequence[int] | None = None
) -> list[StoredFile]:
    """Fetch files, or their first bytes, into the store, behind a bar."""
    sizes = [file.origin.size for file in files] if sizes is None else sizes
    transfers = [
        Transfer(file.label, file.origin, size) for file, size in zip(files, sizes, strict=True)
    ]
    with options.progress(total=sum(sizes), unit="byte") as bar:
        return store.fetch(transfers, options.store, options.network, bar)


def fetch_tokenizer(listing: Listing, folder: Path, options: FetchOptions) -> int | None:
    """Fetch the tokenizer's files; return the size of its vocabulary, None without one."""
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


def _check_versions(listing: Listing) -> None:
    """Check that token files can be read in parts, each of the version that was listed."""
    for file in listing.files:
        if file.origin.tag is None and not file.origin.is_addressed:
            raise LockstepError(
                f"{file.label}: the server names no version of it, neither an ETag nor a date, "
                "expected one with [download] stream: a part may be of another version"
            )


def _shard_paths(chosen: list[ChosenFile]) -> Iterator[tuple[ChosenFile, str]]:
    """Yield each fetched file with its path in the shards folder: its number in its split."""
    counts = dict.fromkeys((TRAIN, HELD_OUT), 0)
    for pick in chosen:
        yield pick, shard_path(pick.split, counts[pick.split])
        counts[pick.split] += 1


def _shard(pick: ChosenFile, path: str, sha256: str | None) -> ShardFile:
    return ShardFile(
        path=path,
        split=pick.split,
        tokens=pick.tokens,
        sha256=sha256,
        name=pick.file.name,
        part=pick.file.part,
        origin=pick.file.origin if sha256 is None else None,
    )


def _version(origin: Origin) -> str:
    """Return a hash of size and version, in place of the SHA-256 of a token file not read yet."""
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
    sizes = [pick.tokens * listing.size for pick in chosen]
    fetched = fetch_files([pick.file for pick in chosen], options, sizes)
    files = []
    with options.progress(total=len(chosen), unit="file") as bar:
        for (pick, path), size, stored in zip(_shard_paths(chosen), sizes, fetched, strict=True):
            sha256 = _place(stored, folder / path, pick.file.origin, size)
            with open(folder / path, "rb") as file:
                _check_signs(file.read(SIZED_TOKENS * listing.size), listing.size, pick.file.label)
            check_file_ids(folder / path, listing.size, vocab, pick.file.label)
            files.append(_shard(pick, path, sha256))
            bar.advance()
    return files


def _place(stored: StoredFile, target: Path, origin: Origin, size: int) -> str:
    """Link a token file to the store; copy one that may change, or is longer than needed.

    Return the SHA-256 of what is in place now.
    """
    if stored.sha256 is not None and stored.path.stat().st_size == size:
        link(stored.path, target)
        return stored.sha256
    digest, left = hashlib.sha256(), size
    with open(stored.path, "rb") as file, written(target) as copy:
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            copy.write(piece)
            digest.update(piece)
            left -= len(piece)
    if left:
        raise LockstepError(
            f"{stored.path}: cut short while it was read, expected {size} bytes as before"
        )
    return digest.hexdigest()


def _check_signs(content: bytes, size: int, name: str) -> None:
    """Check by its beginning that a token file does not say that it is something else."""
    signs.check_tokens(content[: signs.HEAD_BYTES], name)
    if size == 2:
        signs.check_size(np.frombuffer(content, "<u2"), name)


def _check_beside(
    listing: Listing, chosen: Sequence[ChosenFile], options: FetchOptions
) -> tuple[str, ...]:
    """Check what the files beside fetched ones say, the first of each kind; return warnings."""
    by_name = {(file.part, file.name): file for file in listing.beside}
    by_ending: dict[str, tuple[LocationFile, LocationFile]] = {}  # the first that has one
    for pick in chosen:
        for name in signs.beside(pick.file.name):
            if (file := by_name.get((pick.file.part, name))) is not None:
                by_ending.setdefault(PurePosixPath(name).suffix, (pick.file, file))
    warnings = []
    if signs.MASK in by_ending:
        _, mask = by_ending.pop(signs.MASK)
        warnings.append(
            f"{mask.label} says which tokens a loss counts, and is not read: all of them count"
        )
    for tokens, file in by_ending.values():
        if file.origin.size > signs.MOST_BESIDE:
            continue
        (stored,) = fetch_files([file], options)
        bytes_by = next(by for end, by in signs.BESIDE.items() if file.name.endswith(end))
        size = bytes_by(stored.path.read_bytes(), tokens.origin.size)
        if size not in (None, listing.size):
            sizes = {2: "TwoBytes", 4: "FourBytes"}
            raise LockstepError(
                f"{tokens.label}: {file.label} beside it says {size} bytes a token, and "
                f"token_size_in_bytes is {listing.token_size_in_bytes}, expected "
                f"{sizes.get(size, 'tokens of 2 or 4 bytes')}"
            )
    return tuple(warnings)
