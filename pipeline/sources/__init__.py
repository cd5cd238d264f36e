"""Where shards come from: one module for each data location, named in one table.

A provider module of files that already hold tokens has one function, which asks what there is:

  listing(location, network) -> Listing

The files of a listing are chosen in choice.py, and fetched and checked in token_files.py. A module
that makes the tokens itself has two functions. `survey` describes what there is, and fetches none
of it; `fetch` is the work of stage `download`:

  survey(location, options) -> Survey
  fetch(location, folder, options) -> Fetched

Where it can, a third tells the SHA-256 of the source before that work, or None:

  source_sha256(location, options) -> str | None

Rows that are not tokens have their providers in the room `rows`.

`fetch` fills an empty folder with `train/NNNNN.ds`, `held_out/NNNNN.ds` and, where there is a
tokenizer, `tokenizer/` in Hugging Face form. It checks that every token id is below `vocab_size`,
since only it can name the file that the user knows. `location` is the variant of
`model.LLM.data_location` in the run file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.tables.variant import variant_name
from pipeline.net.remote import Origin
from pipeline.runfile import Network, Run, data
from pipeline.runfile.data import Data, DataServer, Limit
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import Progress
from pipeline.tokens.shards import FORMAT, Shards, Split

# A location in the run file -> the module here that provides it. A new provider is a line.
PROVIDERS = {
    data.DataArrays: "rows.arrays",
    data.DataCorpus: "corpus",
    data.DataDummy: "dummy",
    data.DataFiles: "rows.files",
    data.DataHttp: "http",
    data.DataHub: "hub",
    data.DataLocal: "local",
    data.DataPreprocessed: "preprocessed",
    data.DataText: "text.text",
    data.DataUrl: "url",
    data.DataWeightedHttp: "weighted_http",
    data.DataWeightedText: "text.weighted_text",
    data.DataWorkload: "rows.workload",
}

TRAIN, HELD_OUT, TOKENIZER = "train", "held_out", "tokenizer"
HELD_OUT_TOKENS = 2**20  # at most, where a limit cuts the train tokens


@dataclass(frozen=True)
class FetchOptions:
    """How a run wants the data of its location.

    Args:
      store: folder of fetched files, shared by every run of this checkout.
      limit: limit of the train split; None for all of it.
      stream: whether token files stay where they are, to be read while training.
      network: connections, time limits and attempts.
      progress: `progress(total=..., unit=...)` is a bar for a part of the work.
      measured: whether held-out loss is measured; otherwise the run trains on what is held out by
        default.
      dataset: returns the arrays of the workload's own `dataset`, by split and name; None without
        a workload that has it.
    """

    store: Path
    limit: Limit | None
    stream: bool
    network: Network
    progress: Callable[..., Progress]
    measured: bool = True
    dataset: Callable[[], Mapping[Split, Mapping[str, np.ndarray]]] | None = None


class SurveyedFile(NamedTuple):
    """A file that a run would read.

    Attributes:
      name: path in the location.
      split: split that its tokens belong to.
      size: bytes read of it.
      tokens: tokens in these; None where only reading tells.
    """

    name: str
    split: Split
    size: int
    tokens: int | None


class Survey(NamedTuple):
    """What a run would read of a data location.

    Attributes:
      read: description of the location.
      files: files that would be read, in order.
      train_files: number of files of the train split, without a limit.
      warnings: one line each, for the user.
      held_out_by_default: see `Shards`.
      row_words: words of a row that is not tokens; None for tokens.
      first: the first file that is elsewhere; None if all are here.
      text_bytes: bytes of text to train on, about; None where only reading tells, or of no text.
    """

    read: str
    files: tuple[SurveyedFile, ...]
    train_files: int
    warnings: tuple[str, ...] = ()
    held_out_by_default: bool = False
    row_words: int | None = None
    first: Origin | None = None
    text_bytes: int | None = None

    def all_to_train(self) -> "Survey":
        """Return this with the files that are held out by default in the train split."""
        if not self.held_out_by_default:
            return self
        files = tuple(file._replace(split=TRAIN) for file in self.files)
        return self._replace(files=files, train_files=len(files))


class Fetched(Shards):
    """The shards that a provider wrote, or that are read while training.

    The `sha256` of `source` covers names and contents, so that two equal ones mean the same data;
    of files that are read while training, it covers names, sizes and the server's versions.
    """

    format: int = FORMAT
    unproven: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    """SHA-256 of files in the store for which no server gave a checksum."""
    warnings: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    """One line each, for the user."""


def fetch_options(run: Run, paths: Paths) -> FetchOptions:
    """Return how the run wants its data."""
    return FetchOptions(
        store=paths.store,
        limit=run.download.limit,
        stream=run.download.stream,
        network=run.runtime,
        progress=partial(Progress, "download"),
        measured=run.held_out.sequences > 0,
    )


def survey(location: Data, options: FetchOptions) -> Survey:
    """Describe what a run would read: listings are requested, but no files.

    Raises:
      LockstepError: the location cannot be read, or has no usable files.
    """
    from pipeline.sources import choice
    from pipeline.sources.listing import look_up

    provider = provider_of(location, options)
    if hasattr(provider, "listing"):
        return choice.survey(look_up(provider, location, options), options)
    return provider.survey(location, options)


def fetch(location: Data, folder: Path, options: FetchOptions) -> Fetched:
    """Fill an empty folder with the location's shards and tokenizer.

    Raises:
      LockstepError: the location cannot be read, or its files are not valid tokens.
    """
    from pipeline.sources import token_files
    from pipeline.sources.listing import look_up

    provider = provider_of(location, options)
    if hasattr(provider, "listing"):
        return token_files.fetch(look_up(provider, location, options), folder, options)
    return provider.fetch(location, folder, options)


def source_sha256(location: Data, options: FetchOptions) -> str | None:
    """Return the `sha256` that `fetch` will give as its source's; None where only that tells.

    Raises:
      LockstepError: the location cannot be read.
    """
    ask = getattr(provider_of(location, options), "source_sha256", None)
    return None if ask is None else ask(location, options)


def provider_of(location: Data, options: FetchOptions | None = None) -> ModuleType:
    """Return the module that provides a data location.

    Raises:
      LockstepError: this release has none, or the run wants to stream what it makes itself.
    """
    if isinstance(location, DataServer):
        raise LockstepError(
            f"{variant_name(location)}: would need a Psyche data server at {location.address}, and "
            "its protocol, which this release does not speak; expected a location of files, such "
            "as Http or Hub: `lockstep import` makes one of the data.toml beside a state.toml"
        )
    provider = import_module(f"{__name__}.{PROVIDERS[type(location)]}")
    if options and options.stream and getattr(provider, "MAKES_TOKENS", False):
        raise LockstepError(
            f"download.stream is true, expected false with {variant_name(location)}: it is made "
            "into token files before training"
        )
    return provider
