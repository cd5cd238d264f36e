"""The shards folder: `shards.json`, which lists the token files of each split, and these files.

A `.ds` file is Psyche's and datatrove's format: tokens as little-endian unsigned integers of 2 or 4
bytes, and nothing else. `shards.json` also gives the origin of files that are not in the folder,
and, where rows are not tokens, what they are (rows.py).
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, JsonValue, model_validator

from lockstep.errors import LockstepError
from lockstep.files import write_bytes, write_json
from lockstep.programs.columns import PLAIN, Column
from lockstep.tables.table import Table, wrong
from lockstep.tables.validation import validate_json
from pipeline.net.origin import Origin
from pipeline.runfile.data import AnyShuffle
from pipeline.tokens.rows import AnyRows

SHARDS, SHARDS_FORMAT = "shards.json", 2
ZEROS = "zeros:"  # the address of a file of zeros that exists nowhere

Split = Literal["train", "held_out"]


def _check_format(number: int) -> int:
    if number != SHARDS_FORMAT:
        raise wrong((), f"{SHARDS_FORMAT}: another release wrote it; run the stage download again")
    return number


class ShardFile(Table):
    """One token file, by its path in the folder and its name at the source.

    It is `tokens` long: a longer origin is read up to that. `sha256` is None if its bytes are not
    in the folder, but are read from `origin` while training. `part` is an index of `Shards.parts`.
    """

    path: Annotated[str, Field(pattern=r"^(train|held_out)/[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
    split: Split
    tokens: Annotated[int, Field(gt=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    name: str
    part: Annotated[int, Field(ge=0)] = 0
    origin: Origin | None = None

    @property
    def is_here(self) -> bool:
        """Whether the token file is in the shards folder."""
        return self.sha256 is not None

    def label(self, folder: Path) -> str:
        """Return the token file's name in errors: its path here, and its name at the source."""
        if not self.is_here:
            return self.name
        source = "" if self.name == self.path else f" ({self.name})"
        return f"{folder / self.path}{source}"


def _check_columns(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    if "inputs" not in columns or len(set(columns)) < len(columns):
        raise wrong((), "the inputs, and no column twice")
    return columns


RowColumns = Annotated[tuple[Column, ...], AfterValidator(_check_columns)]


class Part(Table):
    """One of several data locations that are mixed; only train files have parts.

    `shuffle` orders its own sequences. Its share of all is `weight`, relative to all weights; None
    for all parts: by their lengths.
    """

    shuffle: AnyShuffle
    weight: Annotated[float, Field(gt=0)] | None


class Shards(Table):
    """The document `shards.json`. Files of a split are read in the order of the list.

    A sequence of L tokens is stored as `len(columns) * L` numbers, one column after the other.
    """

    format: Annotated[int, AfterValidator(_check_format)]
    """Version of this format."""
    token_size_in_bytes: Literal[2, 4]
    vocab_size: Annotated[int, Field(gt=0)] | None
    shuffle: AnyShuffle
    """Order of all sequences of the train split."""
    parts: tuple[Part, ...] = ()
    """Locations that are mixed; empty if there is only one."""
    columns: RowColumns = PLAIN
    """Columns of a row; those beside the inputs come from Preprocessed data."""
    rows: AnyRows | None = Field(default=None, exclude_if=lambda rows: rows is None)
    """What a row is where it is not tokens: its words are then all of the column `inputs`."""
    files: tuple[ShardFile, ...]
    held_out_by_default: bool = False
    """Whether files are held out by default, the last of each location, since none was named."""
    held_out_seen: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the held-out split's windows that stand in the train split (tokens/seen.py); None
    where it is not known."""
    source: dict[str, JsonValue]

    def split(self, split: Split) -> tuple[ShardFile, ...]:
        """Return the shards' files of one split, in order."""
        return tuple(file for file in self.files if file.split == split)

    def all_to_train(self) -> "Shards":
        """Return these shards with the files that are held out by default in the train split."""
        if not self.held_out_by_default:
            return self
        files = tuple(file.model_copy(update={"split": "train"}) for file in self.files)
        return self.model_copy(update={"files": files})

    @property
    def row_length(self) -> int | None:
        """The max_seq_len that data in rows require; None if tokens are cut into sequences."""
        return self.source.get("row_tokens") if self.rows is None else self.rows.words

    @model_validator(mode="after")
    def _fits_together(self) -> "Shards":
        plain = (4, None, PLAIN)
        if self.rows and (self.token_size_in_bytes, self.vocab_size, self.columns) != plain:
            raise wrong("rows", "words of 4 bytes, no vocabulary, and the column inputs alone")
        if len({part.weight is None for part in self.parts}) > 1:
            raise wrong("parts", "a weight of each part, or of none")
        for file in self.files:
            if file.sha256 is None and file.origin is None:
                raise wrong("files", f"a sha256 or an origin of {file.path}")
            if file.part >= max(1, len(self.parts)) and file.split == "train":
                raise wrong("files", f"one of {len(self.parts)} parts of {file.path}")
        return self


def read_shards(folder: Path) -> Shards:
    """Read `shards.json`, and check the length of every file that it lists in the folder.

    Raises:
      LockstepError: it is missing or malformed, or a file is missing or of another length.
    """
    path = folder / SHARDS
    try:
        shards = _parse(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise LockstepError(f"{path}: not there, expected from the stage download") from error
    for file in shards.files:
        if not file.is_here:
            continue
        expected = file.tokens * shards.token_size_in_bytes
        try:
            size = os.stat(f"{folder}/{file.path}").st_size  # 10,000 paths take their time
        except FileNotFoundError as error:
            raise LockstepError(f"{folder / file.path}: not there, listed in {path}") from error
        if size != expected:
            raise LockstepError(
                f"{folder / file.path}: found {size} bytes, expected {expected} as {path} says"
            )
    return shards


@lru_cache(maxsize=2)  # a stage reads it several times, and 10,000 files take a while
def _parse(text: bytes, name: str) -> Shards:
    return validate_json(Shards, text, name)


def write_shards(folder: Path, shards: Shards) -> None:
    """Write `shards.json`."""
    write_json(folder / SHARDS, shards.model_dump(mode="json"))


def shard_path(split: Split, number: int) -> str:
    """Return the path of a split's `number`-th shard; names sort in that order."""
    return f"{split}/{number:05}.ds"


def write_shard(
    folder: Path, split: Split, number: int, numbers: np.ndarray, name: str | None = None
) -> ShardFile:
    """Write a split's `number`-th shard, and describe it.

    `numbers` are little-endian integers of the token size; by default `name` is the file's path.
    """
    path, data = shard_path(split, number), numbers.tobytes()
    write_bytes(folder / path, data)
    sha256 = hashlib.sha256(data).hexdigest()
    return ShardFile(path=path, split=split, tokens=numbers.size, sha256=sha256, name=name or path)


def duplicates(shards: Shards) -> list[tuple[str, str]]:
    """Return the names of shards' files with equal hashes: each with the first that has it."""
    first: dict[str, str] = {}
    pairs = []
    for file in shards.files:
        hashes = [f"sha256:{file.sha256}"] if file.is_here else []
        if file.origin is not None and file.origin.checksum is not None:
            hashes.append(file.origin.checksum)
        earlier = next((first[digest] for digest in hashes if digest in first), None)
        if earlier is not None:
            pairs.append((earlier, file.name))
        for digest in hashes:
            first.setdefault(digest, file.name)
    return pairs


def count_tokens(size: int, token_size_in_bytes: int, name: str) -> int:
    """Return the length in tokens of a file of `size` bytes: a multiple of the token's, not 0."""
    if size == 0 or size % token_size_in_bytes:
        raise LockstepError(
            f"{name}: found {size} bytes, expected some, a multiple of the token size, "
            f"{token_size_in_bytes} bytes"
        )
    return size // token_size_in_bytes
