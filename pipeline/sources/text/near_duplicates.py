"""Held-out documents that stand in the train split are left out: neither measured nor trained on.

They are found by their windows of tokens (tokens/seen.py), and the held-out split is written again
without them. They do not go to the train split: so what is trained on, and the tokenizer, are those
of the run without them, and no document's place depends on that of another held-out one. A document
of fewer tokens than a window stays; equal ones are on the same side by their hash.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import LockstepError
from pipeline.sources.provider import HELD_OUT, TRAIN
from pipeline.sources.text.split_writer import SplitWriter
from pipeline.tokens import seen
from pipeline.tokens.shards import ShardFile


class Document(NamedTuple):
    """A held-out document's tokens, and the number of its source among several."""

    part: int
    tokens_T: np.ndarray


def leave_out(
    folder: Path,
    files: Sequence[ShardFile],
    size: int,
    end: int,
    most_percent: float,
    borders: Collection[int],
) -> tuple[tuple[ShardFile, ...], list[tuple[int, int]]]:
    """Rewrite the held-out split without documents of which too much is in the train split.

    A file ends where a document does that is near the middle, so that halves of the split are of
    different documents.

    Args:
      folder: of the shards.
      files: both splits.
      size: bytes of a token.
      end: token after each document.
      most_percent: of a document's windows that may stand in the train split.
      borders: numbers of documents before which the file is best ended, such as those at which
        another package begins; before any, where none of these is near the middle.

    Returns:
      The files of both splits, and each document that was left out: its part, and its number there.

    Raises:
      LockstepError: no document is left.
    """
    train = [file for file in files if file.split == TRAIN]
    held_out = [file for file in files if file.split == HELD_OUT]
    every = seen.sampled(held_out)
    own = (document.tokens_T for document in _documents(folder, held_out, size, end))
    seen_H = seen.seen(own, seen.read(folder, train, size), every)
    kept, tokens, left_out, numbers = [], [], [], dict.fromkeys((f.part for f in held_out), 0)
    for document in _documents(folder, held_out, size, end):
        found_H = seen.among(seen.windows(document.tokens_T, every), seen_H)
        kept.append(not len(found_H) or 100 * found_H.mean() <= most_percent)
        tokens.append(len(document.tokens_T) * kept[-1])
        if not kept[-1]:
            left_out.append((document.part, numbers[document.part]))
        numbers[document.part] += 1
    if not any(tokens):
        raise LockstepError(
            f"most_seen_percent is {most_percent:g}: found more than that of each of {len(kept):,} "
            f"held-out documents, in windows of {seen.WINDOW} tokens, in the train text, expected "
            "text that does not repeat itself, or a larger number"
        )
    border = _middle(np.cumsum([0, *tokens]), borders)
    written: list[ShardFile] = []
    numbered = enumerate(_documents(folder, held_out, size, end))
    for part, of_part in groupby(numbered, lambda one: one[1].part):
        writer = SplitWriter(folder / "kept", HELD_OUT, size, None, written, part)
        for number, document in of_part:
            if number == border:
                writer.close()
            if kept[number]:
                writer.add(document.tokens_T)
        writer.close()
    shutil.rmtree(folder / HELD_OUT)
    (folder / "kept" / HELD_OUT).rename(folder / HELD_OUT)
    (folder / "kept").rmdir()
    return (*train, *written), left_out


def _documents(folder: Path, files: Sequence[ShardFile], size: int, end: int) -> Iterator[Document]:
    for part in dict.fromkeys(file.part for file in files):
        rest_T = np.empty(0, f"<u{size}")
        of_part = [file for file in files if file.part == part]
        for tokens_T in seen.read(folder, of_part, size, overlap=0):
            joined_T = np.concatenate([rest_T, tokens_T])
            *whole, rest_T = np.split(joined_T, np.flatnonzero(joined_T == end) + 1)
            yield from (Document(part, document_T) for document_T in whole)
        if len(rest_T):  # a limit cut it short
            yield Document(part, rest_T)


def _middle(before_D: np.ndarray, borders: Collection[int]) -> int:
    """Return the document before which about half of the tokens are; one of `borders`, if near."""
    total = before_D[-1]
    near = [number for number in borders if total <= 4 * before_D[number] <= 3 * total]
    return int(min(near or range(len(before_D)), key=lambda n: abs(2 * before_D[n] - total)))
