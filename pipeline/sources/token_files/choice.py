"""Which files of a listing a run reads.

Names say what is held out (signs.py): the files of the first of HELD_OUT_SPLITS that is there, and
those of the others are not used. Where no name says it, the last file is held out, unless the run
measures no held-out loss. A single file is not held out. A warning says so in both cases, to a run
that measures one. A limit is on the train split; where it cuts by tokens or steps, at most
HELD_OUT_TOKENS of the held-out split are fetched.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import NamedTuple

from lockstep.errors import LockstepError
from pipeline.net.origin import Origin
from pipeline.runfile.data import Limit
from pipeline.sources.provider import (
    HELD_OUT,
    HELD_OUT_TOKENS,
    TRAIN,
    FetchOptions,
    Survey,
    SurveyedFile,
)
from pipeline.sources.token_files.listing import EXTENSIONS, Listing, LocationFile
from pipeline.tokens.shards import Split, count_tokens
from pipeline.tokens.signs import HELD_OUT_SPLITS, split_of


class ChosenFile(NamedTuple):
    """A file that a run reads, or the first tokens of one."""

    file: LocationFile
    split: Split
    tokens: int


def survey(listing: Listing, options: FetchOptions) -> Survey:
    """Describe what a run would read of a listing."""
    chosen, warnings = choose(listing, options)
    files = tuple(
        SurveyedFile(one.file.name, one.split, one.tokens * listing.size, one.tokens)
        for one in chosen
    )
    whole, _ = choose(listing, replace(options, limit=None))
    train_files = sum(one.split == TRAIN for one in whole)
    by_default = is_by_default(listing, options.limit)
    first = first_far(one.file for one in chosen)
    return Survey(listing.read, files, train_files, warnings, by_default, first=first)


def first_far(files: Iterable[LocationFile]) -> Origin | None:
    """Return where the first file is that is not on this machine; None if all are."""
    return next((file.origin for file in files if not file.origin.is_local), None)


def is_by_default(listing: Listing, limit: Limit | None) -> bool:
    """Return whether files are held out that a run without held-out loss trains on.

    A limit says what a run trains on: then there are none.
    """
    named = any(split in HELD_OUT_SPLITS for split in _splits(listing.files, unnamed=True))
    return limit is None and not (listing.says_held_out or named)


def by_name(
    files: Sequence[LocationFile], read: str, *, unnamed: bool
) -> tuple[list[LocationFile], list[LocationFile], list[str]]:
    """Return the files to train on, those to hold out, and warnings of those that are not used.

    Args:
      files: of a location.
      read: what errors call it.
      unnamed: whether files that name no split are trained on beside some that are named `train`.

    Raises:
      LockstepError: none are left to train on.
    """
    splits: dict[str | None, list[LocationFile]] = {}
    said = _splits(files, unnamed=unnamed)
    for file, split in zip(files, said, strict=True):
        splits.setdefault(split, []).append(file)
    wanted = {TRAIN, None} if unnamed or TRAIN not in splits else {TRAIN}
    train = [file for file, split in zip(files, said, strict=True) if split in wanted]
    used = next((split for split in HELD_OUT_SPLITS if split in splits), None)
    trained = {file.part for file in train}
    for file in files:
        if file.part in trained:
            continue
        raise LockstepError(
            f"{read}: found only held-out files, {file.name} among them, expected train files "
            f"too: a name says a split by a word, {TRAIN} or {', '.join(HELD_OUT_SPLITS)}"
        )
    warnings = []
    for name, some in splits.items():
        if name not in wanted | {used}:
            kind = f"of split {name}" if name else "without a split in their names"
            warnings.append(f"{read}: {len(some)} files {kind} are not used")
    return train, splits.get(used, []) if used else [], warnings


def _splits(files: Sequence[LocationFile], *, unnamed: bool) -> list[str | None]:
    """Return what split each file's name says; of a location's only file, who named it knows."""
    counts = Counter(file.part for file in files)
    return [None if unnamed and counts[f.part] == 1 else split_of(f.name) for f in files]


def sides(
    listing: Listing, options: FetchOptions, *, unnamed: bool = True
) -> tuple[list[LocationFile], list[LocationFile], tuple[str, ...]]:
    """Return the train files and the held-out files of a listing, and warnings; see `by_name`."""
    train, held_out, warnings = by_name(listing.files, listing.read, unnamed=unnamed)
    if not held_out and not listing.says_held_out:
        where = f"{listing.read}: no name says what to hold out"
        train, held_out, warning = hold_out_last(train, where)
        if options.measured or options.limit:  # otherwise all of it is trained on
            warnings.append(warning)
    return train, held_out, tuple(warnings)


def choose(listing: Listing, options: FetchOptions) -> tuple[list[ChosenFile], tuple[str, ...]]:
    """Return the files of both splits that a run reads, and warnings.

    Raises:
      LockstepError: there are no token files, or one is empty or of odd length.
    """
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in {', '.join(EXTENSIONS)}")
    limit = options.limit
    train, held_out, warnings = sides(listing, options)
    whole = [
        ChosenFile(file, TRAIN, count_tokens(file.origin.size, listing.size, file.label))
        for file in train
    ]
    chosen: list[ChosenFile] = []
    for part, share in enumerate(_shares(listing, whole)):
        chosen += _first([one for one in whole if one.file.part == part], limit, share)
    room = max_tokens(limit)[HELD_OUT]
    for file in held_out:
        tokens = count_tokens(file.origin.size, listing.size, file.label)
        if room is not None:
            tokens = min(tokens, room)
            room -= tokens
        if tokens:
            chosen.append(ChosenFile(file, HELD_OUT, tokens))
    return chosen, warnings


def hold_out_last(
    files: Iterable[LocationFile], where: str
) -> tuple[list[LocationFile], list[LocationFile], str]:
    """Hold out the last file of each part that has several, where no name says what to hold out.

    Return the train files, the held-out files, and a warning that begins with `where`.
    """
    parts: dict[int, list[LocationFile]] = {}
    for file in files:
        parts.setdefault(file.part, []).append(file)
    held_out = [of_part.pop() for of_part in parts.values() if len(of_part) > 1]
    train = [file for of_part in parts.values() for file in of_part]
    if not held_out:
        return train, held_out, f"{where} and one file, so nothing is held out"
    names = ", ".join(PurePosixPath(file.name).name for file in held_out)
    said = f"{where}, so the last file, {names}, is held out"
    return train, held_out, f"{said}; with [held_out] sequences = 0 it would be trained on"


def max_tokens(limit: Limit | None) -> dict[Split, int | None]:
    """Return how many tokens of each split a limit allows; None is all of its files."""
    if limit is None or limit.files is not None:
        return {TRAIN: None, HELD_OUT: None}
    train = limit.tokens if limit.steps is None else limit.sequences * limit.max_seq_len
    return {TRAIN: train, HELD_OUT: HELD_OUT_TOKENS}


def _shares(listing: Listing, whole: list[ChosenFile]) -> list[float]:
    """Return each part's share of a limit."""
    if not listing.parts:
        return [1.0]
    weights = [part.weight or 0.0 for part in listing.parts]
    if not any(weights):  # by length
        for one in whole:
            weights[one.file.part] += one.tokens
    return [weight / sum(weights) for weight in weights]


def _first(whole: list[ChosenFile], limit: Limit | None, share: float) -> list[ChosenFile]:
    """Return the first of these files; a limit on tokens or sequences cuts the last."""
    if limit is None or limit.files:
        return whole[: None if limit is None else limit.files]
    # what counts of each file: its tokens, or its whole sequences
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
