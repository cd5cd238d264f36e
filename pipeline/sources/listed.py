"""Locations that are files of tokens as they stand: listed by a provider, fetched and checked here.

Files that end in .ds, .bin or .npy are raw tokens, as Psyche reads them: no header is parsed, not
even of a .npy (one that has a header is refused; Psyche would train on it).

Files in a folder `held_out/` are the held-out split; without one, the last file is, and where there
is but one file nothing is: a warning says so in both cases. A limit is on the train split; where it
cuts by tokens or steps, at most HELD_OUT_TOKENS of the held-out split are fetched.

A tokenizer is taken from a folder `tokenizer/`, or from a `tokenizer.json` beside the files.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from pipeline.errors import LockstepError
from pipeline.net import addresses, web
from pipeline.net import store
from pipeline.net.redact import hide
from pipeline.net.remote import Origin
from pipeline.net.store import Transfer
from pipeline.runfile.data import TOKEN_BYTES, AnyShuffle, Limit, TokenSize
from pipeline.runfile.explain import validate
from pipeline.runfile.serde_enum import Variant, variant_name
from pipeline.runfile.table import Table
from pipeline.sources import (
    HELD_OUT,
    HELD_OUT_TOKENS,
    TOKENIZER,
    TRAIN,
    Fetched,
    Survey,
    SurveyedFile,
    Wanted,
)
from pipeline.stage import artifacts
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.ids import check_file_ids
from pipeline.tokens.shards import Part, ShardFile, Split, shard_path
from pipeline.tokens.tokenizer_files import TOKENIZER_FILES

EXTENSIONS = (".ds", ".bin", ".npy")
NUMPY_MAGIC = b"\x93NUMPY"
PIECE_BYTES = 2**20
Answer = TypeVar("Answer", bound=BaseModel)
TOKENIZER_BYTES = 2**27  # at most, of one of its files


class Listed(Table):
    """A file of a location: its path there, and where its bytes are."""

    name: str
    """Its path in the location, as errors say it."""
    origin: Origin
    """Where its bytes are."""
    part: Annotated[int, Field(ge=0)] = 0
    """Which of the locations that are mixed it belongs to."""


class Listing(Table):
    """What a location has, in the order in which it is read."""

    read: str
    """The location, in words."""
    token_size_in_bytes: TokenSize
    """Of every file."""
    shuffle: AnyShuffle
    """Of the train split."""
    files: tuple[Listed, ...]
    """Its token files, in order."""
    tokenizer: tuple[Listed, ...] = ()
    """The files of its tokenizer; each name is one of TOKENIZER_FILES."""
    parts: tuple[Part, ...] = ()
    """What is mixed, where it is several locations."""
    says_held_out: bool = False
    """Whether it says which files are held out, be they none."""
    says: dict[str, str] = {}
    """What else is recorded: the hub's commit."""

    @property
    def size(self) -> int:
        """Bytes of a token."""
        return TOKEN_BYTES[self.token_size_in_bytes]


class Chosen(NamedTuple):
    """A file that a run reads, or the first tokens of one."""

    listed: Listed
    split: Split
    tokens: int


# ---- What there is ----


def remembered(wanted: Wanted, asked: Variant, ask: Callable[[], Listing]) -> Listing:
    """A listing; what a server said of the same location before, where one is to ask none.

    Args:
      wanted: its store keeps listings.
      asked: what the listing is of.
      ask: asks the server.

    Raises:
      LockstepError: one is to ask no server, and has not asked this before; or as `ask`.
    """
    name = hashlib.sha256(repr(asked).encode()).hexdigest()[:40]
    path = wanted.store / "listings" / f"{name}.json"
    if not web.offline():
        listing = ask()
        artifacts.write_text(path, _without_users(listing).model_dump_json(indent=1) + "\n")
        return listing
    if not path.is_file():
        raise LockstepError(
            f"{variant_name(asked)}: {web.OFFLINE} is set, expected a location that was listed "
            f"before; no listing of it is in {path.parent}"
        )
    return Listing.model_validate_json(path.read_bytes())


def _without_users(listing: Listing) -> Listing:
    """A listing that may be written down: without the passwords of its addresses."""

    def bare(file: Listed) -> Listed:
        url = addresses.without_user(file.origin.url)
        return file.model_copy(update={"origin": file.origin.model_copy(update={"url": url})})

    files, tokenizer = (tuple(map(bare, some)) for some in (listing.files, listing.tokenizer))
    return listing.model_copy(update={"files": files, "tokenizer": tokenizer})


def token_files(files: Iterable[Listed]) -> tuple[Listed, ...]:
    """Those that are tokens by their names; hidden ones are no data, nor a tokenizer's."""
    found = []
    for file in files:
        *folders, name = PurePosixPath(file.name).parts
        if name.endswith(EXTENSIONS) and not name.startswith(".") and TOKENIZER not in folders:
            found.append(file)
    return tuple(found)


def tokenizer_files(files: Iterable[Listed]) -> tuple[Listed, ...]:
    """The tokenizer among files, under its own names: that in `tokenizer/`, or that beside them."""
    by_name = {file.name: file for file in files}
    for folder in (f"{TOKENIZER}/", ""):
        if f"{folder}tokenizer.json" in by_name:
            return tuple(
                by_name[f"{folder}{name}"].model_copy(update={"name": name})
                for name in TOKENIZER_FILES
                if f"{folder}{name}" in by_name
            )
    return ()


def check_name(name: str, where: str) -> str:
    """A name that a server gave, where it can be a path in a folder.

    Nothing is ever written under such a name; who gives another is not to be trusted.

    Raises:
      LockstepError: it is absolute, leads out of the folder, or has characters that are none.
    """
    parts = name.split("/")
    if "\\" in name or {"", ".", ".."} & set(parts) or not name.isprintable():
        raise LockstepError(f"{where}: lists a file named {name!r:.80}, expected a path inside it")
    return name


def read_answer(kind: type[Answer], document: Any, where: str) -> Answer:
    """What a server says of its files, validated.

    Raises:
      LockstepError: it is not of that form.
    """
    return validate(kind, document, f"{where}: invalid listing")


# ---- What a run reads of it ----


def choose(listing: Listing, limit: Limit | None) -> tuple[list[Chosen], tuple[str, ...]]:
    """The files of both splits that a run reads, and warnings.

    Raises:
      LockstepError: there are no token files; one is empty or of odd length.
    """
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in {', '.join(EXTENSIONS)}")
    train, held_out, warnings = _splits(listing)
    if not train:
        raise LockstepError(
            f"{listing.read}: found held-out files alone, expected some to train on"
        )
    whole = [Chosen(file, TRAIN, _count_tokens(file, listing.size)) for file in train]
    chosen: list[Chosen] = []
    for part, share in enumerate(_shares(listing, whole)):
        chosen += _first([one for one in whole if one.listed.part == part], limit, share)
    room = HELD_OUT_TOKENS if limit is not None and limit.files is None else None
    for file in held_out:
        tokens = _count_tokens(file, listing.size)
        if room is not None:
            tokens = min(tokens, room)
            room -= tokens
        if tokens:
            chosen.append(Chosen(file, HELD_OUT, tokens))
    return chosen, warnings


def _splits(listing: Listing) -> tuple[list[Listed], list[Listed], tuple[str, ...]]:
    """The files of the train and of the held-out split, and a warning where the last was not
    said."""
    train: list[Listed] = []
    held_out: list[Listed] = []
    for file in listing.files:
        said = HELD_OUT in PurePosixPath(file.name).parts[:-1]
        (held_out if said else train).append(file)
    if held_out or listing.says_held_out:
        return train, held_out, ()
    parts: dict[int, list[Listed]] = {}
    for file in train:
        parts.setdefault(file.part, []).append(file)
    held_out = [of_part.pop() for of_part in parts.values() if len(of_part) > 1]
    train = [file for of_part in parts.values() for file in of_part]
    where = f"{listing.read}: no folder {HELD_OUT}/"
    if not held_out:
        return train, held_out, (f"{where} and one file, so nothing is held out",)
    names = ", ".join(PurePosixPath(file.name).name for file in held_out)
    return train, held_out, (f"{where}, so the last file, {names}, is held out",)


def _count_tokens(file: Listed, size: int) -> int:
    found = file.origin.size
    if not found:
        raise LockstepError(f"{label(file)}: found 0 bytes, expected tokens of {size} bytes")
    if found % size:
        raise LockstepError(
            f"{label(file)}: found {found} bytes, expected a multiple of the token size, "
            f"{size} bytes"
        )
    return found // size


def _shares(listing: Listing, whole: list[Chosen]) -> list[float]:
    """Of a limit, what goes to each part."""
    if not listing.parts:
        return [1.0]
    weights = [part.weight or 0.0 for part in listing.parts]
    if not any(weights):  # by length
        for one in whole:
            weights[one.listed.part] += one.tokens
    return [weight / sum(weights) for weight in weights]


def _first(whole: list[Chosen], limit: Limit | None, share: float) -> list[Chosen]:
    """The first of these files; where a limit counts tokens or sequences, the last is cut."""
    if limit is None or limit.files:
        return whole[: None if limit is None else limit.files]
    # of each file what counts: its tokens, or its whole sequences
    unit, most = limit.max_seq_len or 1, limit.sequences or limit.tokens
    left = most if share == 1 else math.ceil(most * share) + 1  # rounded up: no less in all
    chosen = []
    for one in whole:
        units = min(one.tokens // unit, left)
        left -= units
        if units == one.tokens // unit and units:
            chosen.append(one)
        elif units:
            chosen.append(one._replace(tokens=units * unit))
    return chosen


def label(file: Listed) -> str:
    """What errors call a file: its address, without credentials."""
    url = file.origin.url
    return url if file.origin.is_local else hide(url.partition("#")[0])


def survey(listing: Listing, wanted: Wanted) -> Survey:
    """What a run would read of a listing.

    Raises:
      LockstepError: as `choose`.
    """
    chosen, warnings = choose(listing, wanted.limit)
    files = tuple(
        SurveyedFile(one.listed.name, one.split, one.tokens * listing.size, one.tokens)
        for one in chosen
    )
    there, _ = choose(listing, None)
    return Survey(listing.read, files, sum(one.split == TRAIN for one in there), warnings)


# ---- Fetched ----


def fetch_listed(listing: Listing, folder: Path, wanted: Wanted) -> Fetched:
    """Fetches what a run reads of a listing, checks it, and puts it in its place.

    Raises:
      LockstepError: as `choose` and `fetch.fetch`; a file is no tokens, or has an id beyond the
        tokenizer's vocabulary.
    """
    chosen, warnings = choose(listing, wanted.limit)
    vocab_size = fetch_tokenizer(listing, folder, wanted)
    if wanted.stream:
        _check_addresses(listing)
        files = [_shard(one, path, None) for one, path in _places(chosen)]
        versions = [(file.name, _version(file.origin)) for file in files]
    else:
        files = _fetch_files(listing, chosen, vocab_size, folder, wanted)
        versions = [(file.name, file.sha256) for file in files]
    names = {
        split: [one.listed.name for one in chosen if one.split == split]
        for split in (TRAIN, HELD_OUT)
    }
    return Fetched(
        files=tuple(files),
        token_size_in_bytes=listing.size,
        vocab_size=vocab_size,
        shuffle=listing.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": names,
            "sha256": listing_sha256(versions),
        },
        parts=listing.parts,
        unproven=tuple(
            file.sha256
            for file, one in zip(files, chosen, strict=True)
            if file.is_here and _is_unproven(one, listing.size)
        ),
        warnings=warnings,
    )


def _is_unproven(one: Chosen, size: int) -> bool:
    """Whether nothing says that the bytes are right: no checksum, or but a part of the file."""
    origin = one.listed.origin
    return origin.checksum is None or one.tokens * size < origin.size


def _check_addresses(listing: Listing) -> None:
    """Sees that no password would be written into data/shards, for training to find."""
    for file in listing.files:
        if addresses.without_user(file.origin.url) != file.origin.url:
            raise LockstepError(
                f"{label(file)}: found a password in its address, expected none with [download] "
                "stream: it would be written into data/shards"
            )


def _places(chosen: list[Chosen]) -> Iterator[tuple[Chosen, str]]:
    """Each file, and its path in the shards folder: its number in its split."""
    counts = dict.fromkeys((TRAIN, HELD_OUT), 0)
    for one in chosen:
        yield one, shard_path(Path(), one.split, counts[one.split]).as_posix()
        counts[one.split] += 1


def _shard(one: Chosen, path: str, sha256: str | None) -> ShardFile:
    return ShardFile(
        path=path,
        split=one.split,
        tokens=one.tokens,
        sha256=sha256,
        name=one.listed.name,
        part=one.listed.part,
        origin=one.listed.origin if sha256 is None else None,
    )


def _version(origin: Origin) -> str:
    """In place of the SHA-256 of a file that is not read yet: of its size and version."""
    said = f"{origin.size} {origin.tag} {origin.checksum}"
    return hashlib.sha256(said.encode()).hexdigest()


def _fetch_files(
    listing: Listing, chosen: list[Chosen], vocab_size: int | None, folder: Path, wanted: Wanted
) -> list[ShardFile]:
    for split in (TRAIN, HELD_OUT):
        (folder / split).mkdir()
    wishes = [
        Transfer(label(one.listed), one.listed.origin, one.tokens * listing.size) for one in chosen
    ]
    with wanted.progress(total=sum(wish.size for wish in wishes), unit="byte") as bar:
        kept = store.fetch(wishes, wanted.store, wanted.network, bar)
    files = []
    with wanted.progress(total=len(chosen), unit="file") as bar:
        for (one, path), wish, found in zip(_places(chosen), wishes, kept, strict=True):
            _put(found.path, folder / path, wish)
            _check_tokens(folder / path, listing.size, vocab_size, wish.name)
            files.append(_shard(one, path, found.sha256))
            bar.advance()
    return files


def _put(source: Path, target: Path, wish: Transfer) -> None:
    """Links to the store; copies what may change, or is more than was wished for."""
    if not wish.origin.is_local and source.stat().st_size == wish.size:
        artifacts.link(source, target)
        return
    with open(source, "rb") as file, artifacts.written(target) as copy:
        left = wish.size
        while left and (piece := file.read(min(PIECE_BYTES, left))):
            copy.write(piece)
            left -= len(piece)


def _check_tokens(path: Path, size: int, vocab_size: int | None, name: str) -> None:
    """Sees that a file is tokens of the vocabulary."""
    with open(path, "rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise LockstepError(
                f"{name}: found a NumPy header, expected tokens alone, as `tofile` writes them"
            )
    check_file_ids(path, size, vocab_size, name)


# ---- The tokenizer ----


def fetch_tokenizer(listing: Listing, folder: Path, wanted: Wanted) -> int | None:
    """Puts the tokenizer's files in their place; the size of its vocabulary, None without one."""
    if not listing.tokenizer:
        return None
    wishes = [Transfer(label(file), file.origin, file.origin.size) for file in listing.tokenizer]
    for wish in wishes:
        if wish.size > TOKENIZER_BYTES:
            raise LockstepError(
                f"{wish.name}: {wish.size} bytes, expected at most {TOKENIZER_BYTES} of a tokenizer"
            )
    with wanted.progress(total=sum(wish.size for wish in wishes), unit="byte") as bar:
        kept = store.fetch(wishes, wanted.store, wanted.network, bar)
    (folder / TOKENIZER).mkdir()
    for file, wish, found in zip(listing.tokenizer, wishes, kept, strict=True):
        _put(found.path, folder / TOKENIZER / file.name, wish)
        if file.name == "tokenizer.json":
            vocab_size = count_vocab(found.path, wish.name)
    return vocab_size


def count_vocab(tokenizer_json: Path, name: str) -> int:
    """One more than the largest token id, added tokens included.

    Args:
      tokenizer_json: the file.
      name: what errors call it.

    Raises:
      LockstepError: the file is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises bare Exceptions
        raise LockstepError(
            f"{name}: expected a tokenizer of the `tokenizers` library: {error}"
        ) from error
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
