"""Where shards come from: one module for each data location, named in one table.

A provider module has two functions. `survey` says what there is, and fetches none of it; `fetch` is
the work of stage `download`:

  survey(location, wanted) -> Survey
  fetch(location, folder, wanted) -> Fetched

`fetch` fills an empty folder with `train/NNNNN.ds`, `held_out/NNNNN.ds` and, where there is a
tokenizer, `tokenizer/` in Hugging Face form. It sees to it that every token id is below
`vocab_size`, since it alone can name the file that the user knows. `location` is the variant of
`model.LLM.data_location` in the run file. Where a location is files of tokens as they stand, the
module lists them, and listed.py does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pipeline.errors import LockstepError
from pipeline.runfile import Run
from pipeline.runfile.data import (
    Data,
    DataCorpus,
    DataDummy,
    DataHttp,
    DataHub,
    DataLocal,
    DataPreprocessed,
    DataServer,
    DataUrl,
    DataWeightedHttp,
    Limit,
    Shuffle,
)
from pipeline.runfile.network import Network
from pipeline.runfile.serde_enum import variant_name
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import Progress
from pipeline.tokens.shards import Column, Part, ShardFile, Split

# A location in the run file -> the module here that fetches it. A new provider is a line.
PROVIDERS = {
    DataCorpus: "corpus",
    DataDummy: "dummy",
    DataHttp: "http",
    DataHub: "hub",
    DataLocal: "local",
    DataPreprocessed: "preprocessed",
    DataUrl: "url",
    DataWeightedHttp: "weighted_http",
}

TRAIN, HELD_OUT, TOKENIZER = "train", "held_out", "tokenizer"
HELD_OUT_TOKENS = 2**20  # at most, where a limit cuts the train tokens

MakeBar = Callable[..., Progress]


@dataclass(frozen=True)
class Wanted:
    """What a run wants of its data location.

    Args:
      store: where fetched files are kept, for every run of this checkout.
      limit: how much of the train split; None is all.
      stream: whether token files stay where they are, to be read while training.
      network: how the network is used.
      progress: `progress(total=..., unit=...)` is a bar for each part of the work.
    """

    store: Path
    limit: Limit | None
    stream: bool
    network: Network
    progress: MakeBar


def wanted(run: Run, paths: Paths) -> Wanted:
    """What the run wants of its data location."""
    return Wanted(
        store=paths.store,
        limit=run.download.limit,
        stream=run.download.stream,
        network=run.runtime.network,
        progress=partial(Progress, "download"),
    )


class SurveyedFile(NamedTuple):
    """A file that a run would read.

    Attributes:
      name: its name in the location.
      split: where its tokens go.
      bytes: that are read of it.
      tokens: in these; None where only reading tells.
    """

    name: str
    split: Split
    bytes: int
    tokens: int | None


class Survey(NamedTuple):
    """What of a data location a run would read.

    Attributes:
      read: the location, in words.
      files: what would be read, in order.
      train_files: of the train split, as many as the location has without a limit.
      warnings: one line each, for the user.
    """

    read: str
    files: tuple[SurveyedFile, ...]
    train_files: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """What a provider says of the files that it wrote, or that are read while training.

    Args:
      files: of each split, in order.
      token_size_in_bytes: 2 or 4, of every file.
      vocab_size: every token id is smaller; None where nothing says so.
      shuffle: the order in which the sequences of the train split are used.
      source: what was read, as JSON; goes into `shards.json`. Its `sha256` is over names and
        contents, so that two equal ones mean the same data; of files that are read while training,
        over names, sizes and what the server calls their versions.
      parts: what is mixed, where it is several locations.
      columns: what is known of each token.
      unproven: the SHA-256 of files in the store of which no server gave a checksum.
      warnings: one line each, for the user.
    """

    files: tuple[ShardFile, ...]
    token_size_in_bytes: int
    vocab_size: int | None
    shuffle: Shuffle
    source: dict
    parts: tuple[Part, ...] = ()
    columns: tuple[Column, ...] = ("inputs",)
    unproven: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def refuse_stream(location: Data, wanted: Wanted) -> None:
    """For locations that are no token files as they stand.

    Raises:
      LockstepError: the run wants to read them while training.
    """
    if wanted.stream:
        raise LockstepError(
            f"download.stream is true, expected false with {variant_name(location)}: it is made "
            "into token files before training"
        )


def get(location: Data) -> ModuleType:
    """The provider of a data location.

    Raises:
      LockstepError: there is none for it.
    """
    if isinstance(location, DataServer):
        raise LockstepError(
            f"{variant_name(location)}: would need a Psyche data server at {location.address}, and "
            "its protocol, which this release does not speak; expected a location of files, such "
            "as Http or Hub"
        )
    return import_module(f"pipeline.sources.{PROVIDERS[type(location)]}")
