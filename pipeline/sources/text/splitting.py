"""The held-out part of a corpus: whole files if possible, else a part of each file."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.errors import LockstepError
from pipeline.runfile.data import Limit
from pipeline.sources.text.documents import Source
from pipeline.stage.progress import Progress

NEAR = 0.5  # whole files are held out if they are at least this share of the bytes to hold out
PERCENT = "model.LLM.data_location.Corpus.held_out_percent"


class Plan(NamedTuple):
    """The files of each split.

    Attributes:
      train: files to train on.
      held_out: files that are held out.
      within: whether a part of each file is held out; then `held_out` is all files.
      named: files that are held out whole too, since their names say so.
    """

    train: list[Source]
    held_out: list[Source]
    within: bool
    named: list[Source] = []  # noqa: RUF012 - never changed

    @property
    def files(self) -> dict[str, Source]:
        """All files, by name."""
        return {file.name: file for file in (*self.train, *self.held_out, *self.named)}


def plan(
    files: Sequence[Source], percent: float, limit: Limit | None, where: str, *, whole: bool
) -> Plan:
    """Assign files to splits; nothing is read.

    Args:
      files: the files, in order.
      percent: held-out share of the bytes.
      limit: its `files` are the first of the train split; the held-out files do not depend on it.
      where: the corpus, for errors.
      whole: whether only whole files may be held out.

    Raises:
      LockstepError: no file is small enough, and only whole files may be held out.
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
        target = sum(sizes.values()) * percent / 100
        within = sum(sizes[name] for name in held_out) < NEAR * target
    most = None if limit is None else limit.files
    return Plan(
        [file for file in files if within or file.name in train][:most],
        [file for file in files if within or file.name in held_out],
        within,
    )


def split(plan: Plan, percent: float, bar: Progress) -> tuple[list[Source], list[Source]]:
    """Return what is read for the train split and for the held-out split.

    Raises:
      LockstepError: no part of any file is small enough, or a file cannot be read.
    """
    if not plan.within:
        return plan.train, [*plan.held_out, *plan.named]
    parts = {file.name: file.split(percent, bar) for file in plan.held_out}
    held_out = [part for _, part in parts.values() if part is not None]
    if not held_out:
        names = " or ".join(parts) if len(parts) < 3 else f"the {len(parts)} files"
        raise LockstepError(
            f"{PERCENT}: found {percent}, expected enough to hold out a document or a line of "
            f"{names}"
        )
    return [parts[file.name][0] for file in plan.train], [*held_out, *plan.named]


def split_by_file(sizes: dict[str, int], held_out_percent: float) -> tuple[list[str], list[str]]:
    """Return train and held-out names: files that fit into `held_out_percent` of all bytes.

    Files are tried in the order of the SHA-256 of their names. So another version of the corpus
    holds out nearly the same files, and one large file does not make the held-out part too large,
    as comparing a hash with a threshold would (5 % of files were 10 % of bytes).
    """
    room = sum(sizes.values()) * held_out_percent / 100
    held_out = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    return [name for name in sizes if name not in held_out], sorted(held_out)
