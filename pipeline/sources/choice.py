"""Which files of a listing a run reads.

Files in a folder `held_out/` are the held-out split; without one, the last file is, unless the run
measures no held-out loss. A single file is not held out. A warning says so in both cases, to a run
that measures one. A limit is on the train split; where it cuts by tokens or steps, at most
HELD_OUT_TOKENS of the held-out split are fetched.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import NamedTuple

from pipeline.errors import LockstepError
from pipeline.net.remote import Origin
from pipeline.runfile.data import Limit
from pipeline.sources import HELD_OUT, HELD_OUT_TOKENS, TRAIN, FetchOptions, Survey, SurveyedFile
from pipeline.sources.listing import EXTENSIONS, Listing, LocationFile
from pipeline.tokens.shards import Split, count_tokens


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
    return limit is None and not _says_held_out(listing)


def choose(listing: Listing, options: FetchOptions) -> tuple[list[ChosenFile], tuple[str, ...]]:
    """Return the files of both splits that a run reads, and warnings.

    Raises:
      LockstepError: there are no token files, or one is empty or of odd length.
    """
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in {', '.join(EXTENSIONS)}")
    limit = options.limit
    train, held_out, warnings = _split(listing)
    if not options.measured and is_by_default(listing, limit):
        warnings = ()  # all of it is trained on
    if not train:
        raise LockstepError(f"{listing.read}: found only held-out files, expected train files too")
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


def _split(listing: Listing) -> tuple[list[LocationFile], list[LocationFile], tuple[str, ...]]:
    """Return the train files, the held-out files, and warnings."""
    train: list[LocationFile] = []
    held_out: list[LocationFile] = []
    for file in listing.files:
        (held_out if _in_held_out(file) else train).append(file)
    if _says_held_out(listing):
        return train, held_out, ()
    train, held_out, warning = hold_out_last(train, f"{listing.read}: no folder {HELD_OUT}/")
    return train, held_out, (warning,)


def _says_held_out(listing: Listing) -> bool:
    return listing.says_held_out or any(map(_in_held_out, listing.files))


def _in_held_out(file: LocationFile) -> bool:
    return HELD_OUT in PurePosixPath(file.name).parts[:-1]


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
