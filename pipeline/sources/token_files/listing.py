"""Listings: which files of tokens a location has, what servers say of each, and which a run reads.

Files that end in .ds, .bin or .npy are raw tokens, as Psyche reads them, without a header. Some
others say something of them (signs.py). A tokenizer comes from a folder `tokenizer/`, where it may
be in an older form, or from a `tokenizer.json` beside the files.

Names say what is held out (signs.py): the files of the first of HELD_OUT_SPLITS that is there, and
those of the others are not used. Where no name says it, the last file is held out, unless the run
measures no held-out loss. A single file is not held out. A warning says so in both cases, to a run
that measures one. A limit is on the train split; where it cuts by tokens or steps, at most
HELD_OUT_TOKENS of the held-out split are fetched.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError, hide
from lockstep.tables.table import Table
from lockstep.tables.variant import variant_name
from pipeline.net.errors import check_name
from pipeline.net.origin import Origin
from pipeline.net.transfers import store
from pipeline.runfile.data import TOKEN_BYTES, AnyShuffle, Data, Limit, TokenSize
from pipeline.sources.provider import (
    HELD_OUT,
    HELD_OUT_TOKENS,
    TOKENIZER,
    TRAIN,
    FetchOptions,
    Survey,
    SurveyedFile,
)
from pipeline.stage.untrusted_files import check_file, stamp
from pipeline.tokens import signs
from pipeline.tokens.shards import Part, Split, count_tokens
from pipeline.tokens.signs import HELD_OUT_SPLITS, split_of
from pipeline.tokens.tokenizer_files import KINDS, TOKENIZER_FILES

EXTENSIONS = (".ds", ".bin", ".npy")
# Keys of a location that say how its files are read, not which they are.
READ_AS = ("token_size_in_bytes", "shuffle")


class LocationFile(Table):
    """A listed file by its path in a location, and where its bytes are.

    Where several locations are mixed, `part` is the number of its own.
    """

    name: str
    origin: Origin
    part: Annotated[int, Field(ge=0)] = 0

    @property
    def label(self) -> str:
        """The listed file's address for errors, without credentials."""
        return self.origin.url if self.origin.is_local else hide(self.origin.url.partition("#")[0])


class Listing(Table):
    """The files of a location, in the order in which they are read.

    Attributes:
      read: description of the location.
      tokenizer: each name is one of TOKENIZER_FILES.
      beside: files that say something of its token files; see signs.py.
      parts: locations that are mixed, if there are several.
      says_held_out: whether it names the held-out files, even if there are none.
      says: what else is recorded: the hub's commit.
    """

    read: str
    token_size_in_bytes: TokenSize
    shuffle: AnyShuffle
    files: tuple[LocationFile, ...]
    tokenizer: tuple[LocationFile, ...] = ()
    beside: tuple[LocationFile, ...] = ()
    parts: tuple[Part, ...] = ()
    says_held_out: bool = False
    says: dict[str, str] = {}

    @property
    def size(self) -> int:
        """Bytes of a token."""
        return TOKEN_BYTES[self.token_size_in_bytes]


def remembered(location: Data, options: FetchOptions, ask: Callable[[], Listing]) -> Listing:
    """Return what `ask` lists; offline, what it listed the last time, to be read as now asked."""
    where = variant_name(location)
    fields = type(location).model_fields
    place = {key: getattr(location, key) for key in fields if key not in READ_AS}
    listing = store.remembered(options.store, Listing, f"{where} {place!r}", where, ask)
    own = {key: getattr(location, key) for key in fields if key in READ_AS}
    return listing.model_copy(update=own)


def listing_fields(files: Iterable[LocationFile]) -> dict[str, tuple[LocationFile, ...]]:
    """Return the fields of a listing that these files of a location fill."""
    files = tuple(files)
    tokens = token_files(files)
    wanted = {beside for file in tokens for beside in signs.beside(file.name)}
    return {
        "files": tokens,
        "tokenizer": tokenizer_files(files),
        "beside": tuple(file for file in files if file.name in wanted),
    }


def token_files(files: Iterable[LocationFile]) -> tuple[LocationFile, ...]:
    """Return the files that hold tokens, by their names; not hidden ones, nor a tokenizer's."""

    def holds_tokens(name: str) -> bool:
        *folders, base = PurePosixPath(name).parts
        return base.endswith(EXTENSIONS) and base[0] != "." and TOKENIZER not in folders

    return tuple(file for file in files if holds_tokens(file.name))


def tokenizer_files(files: Iterable[LocationFile]) -> tuple[LocationFile, ...]:
    """Return the files of the tokenizer in `tokenizer/`, or beside the others, by their names."""
    by_name = {file.name: file for file in files}
    # beside other files, a vocab.json may be of something else
    for folder, kinds in ((f"{TOKENIZER}/", KINDS), ("", KINDS[:1])):
        if any(f"{folder}{kind}" in by_name for kind in kinds):
            return tuple(
                by_name[f"{folder}{name}"].model_copy(update={"name": name})
                for name in TOKENIZER_FILES
                if f"{folder}{name}" in by_name
            )
    return ()


def local_file(path: Path, root: Path) -> LocationFile:
    """Describe a file of this machine for a listing."""
    size, nanoseconds = stamp(path)
    origin = Origin(url=str(path.absolute()), size=size, tag=str(nanoseconds))
    return LocationFile(name=path.relative_to(root).as_posix(), origin=origin)


def check_local(listing: Listing, root: Path) -> Listing:
    """Return the listing of a folder of this machine if its files are in it."""
    for file in (*listing.files, *listing.tokenizer, *listing.beside):
        check_name(file.name, str(root))
        check_file(Path(file.origin.url), root)
    return listing


# ---- Which of them a run reads ----


class ChosenFile(NamedTuple):
    """A listed file that a run reads, or the first tokens of one."""

    file: LocationFile
    split: Split
    tokens: int


def survey_files(listing: Listing, options: FetchOptions) -> Survey:
    """Describe what a run would read of a listing."""
    chosen, warnings = choose(listing, options)
    files = tuple(
        SurveyedFile(pick.file.name, pick.split, pick.tokens * listing.size, pick.tokens)
        for pick in chosen
    )
    train, _, _ = split_files(listing, options)
    by_default = holds_out_by_default(listing, options.limit)
    first = first_far(pick.file for pick in chosen)
    return Survey(listing.read, files, len(train), warnings, by_default, first=first)


def first_far(files: Iterable[LocationFile]) -> Origin | None:
    """Return the origin of the first listed file that is not on this machine; None without."""
    return next((file.origin for file in files if not file.origin.is_local), None)


def choose(listing: Listing, options: FetchOptions) -> tuple[list[ChosenFile], tuple[str, ...]]:
    """Return the listed files of both splits that a run reads, and warnings.

    Raises:
      LockstepError: there are no token files, or one is empty or of odd length.
    """
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in {', '.join(EXTENSIONS)}")
    limit = options.limit
    train, held_out, warnings = split_files(listing, options)
    candidates = [
        ChosenFile(file, TRAIN, count_tokens(file.origin.size, listing.size, file.label))
        for file in train
    ]
    chosen: list[ChosenFile] = []
    for part, share in enumerate(_shares(listing, candidates)):
        chosen += _first([pick for pick in candidates if pick.file.part == part], limit, share)
    room = max_tokens(limit)[HELD_OUT]
    for file in held_out:
        tokens = count_tokens(file.origin.size, listing.size, file.label)
        if room is not None:
            tokens = min(tokens, room)
            room -= tokens
        if tokens:
            chosen.append(ChosenFile(file, HELD_OUT, tokens))
    return chosen, warnings


def split_files(
    listing: Listing, options: FetchOptions, *, unnamed: bool = True
) -> tuple[list[LocationFile], list[LocationFile], tuple[str, ...]]:
    """Return the train files and the held-out files of a listing, and warnings.

    `unnamed` says whether files that name no split are trained on beside some named `train`.
    """
    labels = _splits(listing.files, unnamed=unnamed)
    splits: dict[str | None, list[LocationFile]] = {}
    for file, split in zip(listing.files, labels, strict=True):
        splits.setdefault(split, []).append(file)
    wanted = {TRAIN, None} if unnamed or TRAIN not in splits else {TRAIN}
    train = [file for file, split in zip(listing.files, labels, strict=True) if split in wanted]
    trained = {file.part for file in train}
    other = next((file for file in listing.files if file.part not in trained), None)
    if other is not None:
        raise LockstepError(
            f"{listing.read}: found only held-out files, {other.name} among them, expected train "
            f"files too: a name says a split by a word, {TRAIN} or {', '.join(HELD_OUT_SPLITS)}"
        )
    used = [split for split in HELD_OUT_SPLITS if split in splits][:1]
    held_out = [file for split in used for file in splits[split]]
    warnings = []
    for name, files in splits.items():
        if name not in {*wanted, *used}:
            kind = f"of split {name}" if name else "without a split in their names"
            warnings.append(f"{listing.read}: {len(files)} files {kind} are not used")
    if not held_out and not listing.says_held_out:
        train, held_out, warning = _hold_out_last(train, listing.read)
        if options.measured or options.limit:  # otherwise all of it is trained on
            warnings.append(warning)
    return train, held_out, tuple(warnings)


def holds_out_by_default(listing: Listing, limit: Limit | None) -> bool:
    """Return whether files are held out that a run without held-out loss trains on.

    A limit says what a run trains on: then there are none.
    """
    named = any(split in HELD_OUT_SPLITS for split in _splits(listing.files, unnamed=True))
    return limit is None and not (listing.says_held_out or named)


def _splits(files: Sequence[LocationFile], *, unnamed: bool) -> list[str | None]:
    """Return the split that each listed name says; None for an only file if `unnamed`."""
    counts = Counter(file.part for file in files)
    return [None if unnamed and counts[f.part] == 1 else split_of(f.name) for f in files]


def _hold_out_last(
    files: Iterable[LocationFile], read: str
) -> tuple[list[LocationFile], list[LocationFile], str]:
    """Return train files, the last file of each part that has several, and a warning."""
    parts: dict[int, list[LocationFile]] = {}
    for file in files:
        parts.setdefault(file.part, []).append(file)
    held_out = [of_part.pop() for of_part in parts.values() if len(of_part) > 1]
    train = [file for of_part in parts.values() for file in of_part]
    where = f"{read}: no name says what to hold out"
    if not held_out:
        return train, held_out, f"{where} and one file, so nothing is held out"
    names = ", ".join(PurePosixPath(file.name).name for file in held_out)
    warning = f"{where}, so the last file, {names}, is held out"
    return train, held_out, f"{warning}; with [held_out] sequences = 0 it would be trained on"


def max_tokens(limit: Limit | None) -> dict[Split, int | None]:
    """Return how many tokens of each split a limit allows; None is all of its files."""
    if limit is None or limit.files is not None:
        return {TRAIN: None, HELD_OUT: None}
    train = limit.tokens if limit.steps is None else limit.sequences * limit.max_seq_len
    return {TRAIN: train, HELD_OUT: HELD_OUT_TOKENS}


def _shares(listing: Listing, candidates: list[ChosenFile]) -> list[float]:
    """Return each listed part's share of a limit."""
    if not listing.parts:
        return [1.0]
    weights = [part.weight or 0.0 for part in listing.parts]
    if not any(weights):  # by length
        for pick in candidates:
            weights[pick.file.part] += pick.tokens
    return [weight / sum(weights) for weight in weights]


def _first(candidates: list[ChosenFile], limit: Limit | None, share: float) -> list[ChosenFile]:
    """Return the first of these listed files; a limit on tokens or sequences cuts the last."""
    if limit is None or limit.files:
        return candidates[: None if limit is None else limit.files]
    # what counts of each file: its tokens, or its whole sequences
    unit, most = limit.max_seq_len or 1, limit.sequences or limit.tokens
    left = most if share == 1 else math.ceil(most * share) + 1  # rounded up: no less in all
    chosen = []
    for pick in candidates:
        units = min(pick.tokens // unit, left)
        left -= units
        if units == pick.tokens // unit and units:
            chosen.append(pick)
        elif units:
            chosen.append(pick._replace(tokens=units * unit))
    return chosen
