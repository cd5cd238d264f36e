"""The shards folder: `shards.json`, which lists the token files of each split, and these files.

A `.ds` file is Psyche's and datatrove's format: tokens as little-endian unsigned integers of 2 or 4
bytes, and nothing else. `shards.json` also says where those are that are not in the folder.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from pipeline.errors import LockstepError
from pipeline.net.remote import Origin
from pipeline.runfile.data import AnyShuffle
from pipeline.runfile.explain import validate_json
from pipeline.runfile.table import Table, wrong
from pipeline.stage.artifacts import sha256_file, write_json

SHARDS, FORMAT = "shards.json", 2
ZEROS = "zeros:"  # the address of a file that is nowhere and all zeros

Split = Literal["train", "held_out"]
Column = Literal["inputs", "labels", "position_ids", "sequence_ids"]
PLAIN: tuple[Column, ...] = ("inputs",)


def _of_this_release(number: int) -> int:
    if number != FORMAT:
        raise wrong((), f"{FORMAT}: another release wrote it; run the stage download again")
    return number


class ShardFile(Table):
    """One token file."""

    path: Annotated[str, Field(pattern=r"^(train|held_out)/[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
    """In the folder."""
    split: Split
    tokens: Annotated[int, Field(gt=0)]
    """Its length; of a longer origin, the first so many tokens."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    """None: it is not in the folder but read from `origin` while training."""
    name: str
    """What it is called where it came from."""
    part: Annotated[int, Field(ge=0)] = 0
    """Which of `Shards.parts` it belongs to."""
    origin: Origin | None = None
    """Where its bytes are when they are not in the folder."""

    @property
    def is_here(self) -> bool:
        """Whether it is in the folder."""
        return self.sha256 is not None

    def label(self, folder: Path) -> str:
        """What errors call it: by its path where it is in the folder, and as it was called."""
        if not self.is_here:
            return self.name
        called = "" if self.name == self.path else f" ({self.name})"
        return f"{folder / self.path}{called}"


class Part(Table):
    """One of several data locations that are mixed; only train files have parts."""

    shuffle: AnyShuffle
    """The order of its own sequences."""
    weight: Annotated[float, Field(gt=0)] | None
    """Its share of the sequences, all weights together; None for all: as many as it has."""


class Shards(Table):
    """What `shards.json` says. Files of a split are read in the order in which they stand.

    A sequence of L tokens stands in a file as `len(columns) * L` numbers, the columns one after the
    other.
    """

    format: Annotated[int, AfterValidator(_of_this_release)]
    """Version of this format."""
    token_size_in_bytes: Literal[2, 4]
    vocab_size: Annotated[int, Field(gt=0)] | None
    shuffle: AnyShuffle
    """Of all sequences of the train split."""
    parts: tuple[Part, ...] = ()
    """What is mixed; empty: one location, in the order that `shuffle` says."""
    columns: tuple[Column, ...] = PLAIN
    """What is known of each token; those beside the inputs as Preprocessed data has them."""
    files: tuple[ShardFile, ...]
    source: dict[str, JsonValue]

    def split(self, split: Split) -> tuple[ShardFile, ...]:
        """The files of one split, in order."""
        return tuple(file for file in self.files if file.split == split)

    @model_validator(mode="after")
    def _fits_together(self) -> "Shards":
        if self.columns.count("inputs") != 1 or len(set(self.columns)) < len(self.columns):
            raise wrong("columns", "the inputs, and no column twice")
        if len({part.weight is None for part in self.parts}) > 1:
            raise wrong("parts", "a weight of each part, or of none")
        for file in self.files:
            if file.sha256 is None and file.origin is None:
                raise wrong("files", f"a sha256 or an origin of {file.path}")
            if file.part >= max(1, len(self.parts)) and file.split == "train":
                raise wrong("files", f"one of {len(self.parts)} parts of {file.path}")
        return self


def read_shards(folder: Path) -> Shards:
    """Reads `shards.json`, and checks the length of every file that it lists in the folder.

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
            found = os.stat(f"{folder}/{file.path}").st_size  # 10,000 paths take their time
        except FileNotFoundError as error:
            raise LockstepError(f"{folder / file.path}: not there, listed in {path}") from error
        if found != expected:
            raise LockstepError(
                f"{folder / file.path}: found {found} bytes, expected {expected} as {path} says"
            )
    return shards


@lru_cache(maxsize=2)  # a stage reads it several times, and 10,000 files take a while
def _parse(text: bytes, name: str) -> Shards:
    return validate_json(Shards, text, name)


def write_shards(folder: Path, shards: Shards) -> None:
    """Writes `shards.json`."""
    write_json(folder / SHARDS, shards.model_dump(mode="json"))


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Where the `number`-th token file of a split goes: its name gives its place in the order."""
    return folder / split / f"{number:05}.ds"


def measure(
    folder: Path, token_size_in_bytes: int, names: Mapping[str, str] | None = None
) -> tuple[ShardFile, ...]:
    """The token files that lie in `train/` and `held_out/`, by name, with length and SHA-256.

    Args:
      folder: the shards folder.
      token_size_in_bytes: 2 or 4.
      names: what files are called where they came from, by path in the folder; others are called
        by that path.

    Raises:
      LockstepError: a file is empty or of odd length.
    """
    files = []
    for split in ("train", "held_out"):
        paths = (folder / split).glob("*.ds")
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            inside = f"{split}/{path.name}"
            files.append(
                ShardFile(
                    path=inside,
                    split=split,
                    tokens=count_tokens(path, token_size_in_bytes),
                    sha256=sha256_file(path),
                    name=names[inside] if names and inside in names else inside,
                )
            )
    return tuple(files)


def duplicates(shards: Shards) -> list[tuple[str, str]]:
    """Names of files of equal content, as far as hashes say: each with the first that has it."""
    first: dict[str, str] = {}
    found = []
    for file in shards.files:
        hashes = [f"sha256:{file.sha256}"] if file.is_here else []
        if file.origin is not None and file.origin.checksum is not None:
            hashes.append(file.origin.checksum)
        known = next((first[each] for each in hashes if each in first), None)
        if known is not None:
            found.append((known, file.name))
        for each in hashes:
            first.setdefault(each, file.name)
    return found


def count_tokens(path: Path, token_size_in_bytes: int) -> int:
    """The length of a token file in tokens.

    Raises:
      LockstepError: it is empty, or its length is no multiple of the token size.
    """
    size = path.stat().st_size
    if size == 0:
        raise LockstepError(
            f"{path}: found 0 bytes, expected tokens of {token_size_in_bytes} bytes"
        )
    if size % token_size_in_bytes:
        raise LockstepError(
            f"{path}: found {size} bytes, expected a multiple of the token size, "
            f"{token_size_in_bytes} bytes"
        )
    return size // token_size_in_bytes
