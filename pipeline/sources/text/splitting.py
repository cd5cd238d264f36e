"""What of a corpus is held out: whole files where that can be, else a part of each file."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import LockstepError
from pipeline.runfile.data import Limit
from pipeline.sources.text.documents import Source
from pipeline.stage.progress import Progress

NEAR = 0.5  # whole files are held out where they are at least so much of what was asked for
PERCENT = "model.LLM.data_location.Corpus.held_out_percent"


class Plan(NamedTuple):
    """Which files go into which split.

    Attributes:
      train: files to train on.
      held_out: files that are held out.
      within: whether of each file a part is held out; then `held_out` is all files.
    """

    train: list[Source]
    held_out: list[Source]
    within: bool


def plan(
    files: Sequence[Source], percent: float, limit: Limit | None, where: str, *, whole: bool
) -> Plan:
    """Which of these files go into which split; nothing is read.

    Args:
      files: in order.
      percent: of the bytes, held out.
      limit: its files are the first of the train split; it has no say in what is held out.
      where: they are, for errors.
      whole: whether nothing but whole files may be held out.

    Raises:
      LockstepError: none is small enough, and it has to be whole files.
    """
    sizes = {file.name: file.size for file in files}
    train, held_out = (set(names) for names in split_by_file(sizes, percent))
    if whole and not held_out:
        raise LockstepError(
            f"{PERCENT}: found {percent}, expected enough to hold out one of the {len(files)} "
            f"files in {where}"
        )
    within = False
    if not whole:
        asked = sum(sizes.values()) * percent / 100
        within = sum(sizes[name] for name in held_out) < NEAR * asked
    most = None if limit is None else limit.files
    return Plan(
        [file for file in files if within or file.name in train][:most],
        [file for file in files if within or file.name in held_out],
        within,
    )


def split(plan: Plan, percent: float, bar: Progress) -> tuple[list[Source], list[Source]]:
    """What is read for the train split, and for the held-out split.

    Raises:
      LockstepError: nothing of any file is small enough; or a file cannot be read.
    """
    if not plan.within:
        return plan.train, plan.held_out
    parts = {file.name: file.split(percent, bar) for file in plan.held_out}
    held_out = [part for _, part in parts.values() if part is not None]
    if not held_out:
        names = " or ".join(parts) if len(parts) < 3 else f"the {len(parts)} files"
        raise LockstepError(
            f"{PERCENT}: found {percent}, expected enough to hold out a document or a line of "
            f"{names}"
        )
    return [parts[file.name][0] for file in plan.train], held_out


def split_by_file(sizes: dict[str, int], held_out_percent: float) -> tuple[list[str], list[str]]:
    """Train and held-out names: in the order of the SHA-256 of their names, files are held out as
    long as they fit in `held_out_percent` of all bytes.

    The order does not depend on what else there is, so another version of the corpus holds out
    nearly the same files. One large file does not make the held-out part a multiple of what was
    asked for, as a hash against a threshold would (5 % of files were 10 % of bytes).
    """
    room = sum(sizes.values()) * held_out_percent / 100
    held_out = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    return [name for name in sizes if name not in held_out], sorted(held_out)
