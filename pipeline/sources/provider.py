"""Where shards come from: a provider for each data location, with its arguments and results.

The room `token_files` has the locations whose files hold tokens already, `text` those that are
tokenized here. Each module has one constant, `PROVIDER`; a part has those of its locations. All
that is refused of a location is a LockstepError.

A provider fills an empty folder with `train/NNNNN.ds`, `held_out/NNNNN.ds` and, where there is a
tokenizer, `tokenizer/` in Hugging Face form. It checks that every token id is below `vocab_size`,
since only it can name the file that the user knows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.machine.progress import Progress
from lockstep.tables.variant import variant_name
from pipeline.joints import Joint
from pipeline.net.origin import Origin
from pipeline.runfile import Network, Run, data
from pipeline.stage.artifacts import Paths
from pipeline.tokens.shards import SHARDS_FORMAT, Shards, Split

TRAIN, HELD_OUT, TOKENIZER = "train", "held_out", "tokenizer"
HELD_OUT_TOKENS = 2**20  # at most, where a limit cuts the train tokens


Dataset = Callable[[], Mapping[Split, Mapping[str, np.ndarray]]]
"""dataset() -> arrays [N, ...] by split and name."""


@dataclass(frozen=True)
class FetchOptions:
    """How a run wants the data of its location.

    Args:
      store: folder of fetched files, shared by every run of this checkout.
      limit: on the train split; None for all of it.
      stream: whether token files stay where they are, to be read while training.
      network: connections, time limits and attempts.
      progress: `progress(total=..., unit=...)` is a bar for a part of the work.
      measured: whether held-out loss is measured; otherwise the run trains on what is held out by
        default.
      dataset: returns the arrays that the user's code gives, by split and name; None where the
        location is another.
    """

    store: Path
    limit: data.Limit | None
    stream: bool
    network: Network
    progress: Callable[..., Progress]
    measured: bool = True
    dataset: Dataset | None = None


class OffersDataset(Protocol):
    """Data that code of the user's gives."""

    def opened(self, run: Run) -> AbstractContextManager[Dataset | None]:
        """Yield what reads the data, or None where the run takes none of such code."""


DATASETS = Joint[OffersDataset]("dataset")


@contextmanager
def opened_options(run: Run, paths: Paths) -> Iterator[FetchOptions]:
    """Yield how the run wants its data, and how to ask code of the user's that gives it."""
    options = FetchOptions(
        store=paths.store,
        limit=run.download.limit,
        stream=run.download.stream,
        network=run.runtime,
        progress=partial(Progress, "download"),
        measured=run.held_out.sequences > 0,
    )
    with ExitStack() as stack:
        for part in DATASETS:
            options = replace(options, dataset=stack.enter_context(part.opened(run)))
        yield options


class SurveyedFile(NamedTuple):
    """A file that a run would read: its path in the location, and how many bytes of it.

    `tokens` are those in these bytes; None where only reading tells.
    """

    name: str
    split: Split
    size: int
    tokens: int | None


class Survey(NamedTuple):
    """What a run would read of a data location.

    Attributes:
      read: description of the location.
      files: in the order in which they would be read.
      train_files: number of files of the train split, without a limit.
      warnings: one line each, for the user.
      held_out_by_default: see `Shards`.
      row_words: words of a row that is not tokens; None for tokens.
      first: the first file that is on another machine, if any.
      text_bytes: about how many bytes of text there are to train on; None where only reading tells.
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
        """Return the survey with the files that are held out by default in the train split."""
        if not self.held_out_by_default:
            return self
        files = tuple(file._replace(split=TRAIN) for file in self.files)
        return self._replace(files=files, train_files=len(files))


class Fetched(Shards):
    """The shards that a provider wrote, or that are read while training.

    The `sha256` of `source` covers names and contents, so that two equal ones mean the same data;
    of files that are read while training, it covers names, sizes and the server's versions.
    """

    format: int = SHARDS_FORMAT
    unproven: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    """SHA-256 of files in the store for which no server gave a checksum."""
    warnings: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    """One line each, for the user."""


class Provider(NamedTuple):
    """Fetches or makes the data of one kind of location; every method raises LockstepError.

    `survey` describes what a run would read; it requests listings, and fetches no file. `fetch`
    does the work of stage `download`, in an empty folder. `source_sha256` is what `fetch` will give
    as its source's, where that is known without fetching; else None. `streams` says whether the run
    may read the files where they are, while it trains.
    """

    survey: Callable[[Any, FetchOptions], Survey]
    fetch: Callable[[Any, Path, FetchOptions], Fetched]
    source_sha256: Callable[[Any, FetchOptions], str | None] = lambda location, options: None
    streams: bool = False


# A location in the run file -> the module that provides it. A new provider is a line.
PROVIDERS = {
    data.DataCorpus: "text.corpus",
    data.DataDummy: "token_files.dummy",
    data.DataHttp: "token_files.remote_files",
    data.DataHub: "token_files.remote_files",
    data.DataLocal: "token_files.local",
    data.DataPreprocessed: "token_files.preprocessed",
    data.DataText: "text.text",
    data.DataUrl: "token_files.remote_files",
    data.DataWeightedHttp: "token_files.remote_files",
    data.DataWeightedText: "text.text",
}


class OffersSources(Protocol):
    """Providers of a part's own data locations."""

    PROVIDERS: Mapping[type[data.Data], Provider]


SOURCES = Joint[OffersSources]("sources")


def survey(location: data.Data, options: FetchOptions) -> Survey:
    """Describe what a run would read: listings are requested, but no files."""
    return provider_of(location, options).survey(location, options)


def fetch(location: data.Data, folder: Path, options: FetchOptions) -> Fetched:
    """Fill an empty folder with the location's shards and tokenizer."""
    return provider_of(location, options).fetch(location, folder, options)


def source_sha256(location: data.Data, options: FetchOptions) -> str | None:
    """Return the `sha256` that `fetch` will give its source; None where only fetching tells."""
    return provider_of(location, options).source_sha256(location, options)


def provider_of(location: data.Data, options: FetchOptions | None = None) -> Provider:
    """Return the provider of a data location.

    Raises:
      LockstepError: this release has none, or the run wants to stream what is made here.
    """
    if isinstance(location, data.DataServer):
        raise LockstepError(
            f"{variant_name(location)}: would need a Psyche data server at {location.address}, and "
            "its protocol, which this release does not speak; expected a location of files, such "
            "as Http or Hub: `lockstep import` makes one of the data.toml beside a state.toml"
        )
    kind = type(location)
    provider = next((part.PROVIDERS[kind] for part in SOURCES if kind in part.PROVIDERS), None)
    provider = provider or import_module(f"{__package__}.{PROVIDERS[kind]}").PROVIDER
    if options and options.stream and not provider.streams:
        raise LockstepError(
            f"download.stream is true, expected false with {variant_name(location)}: it is made "
            "into token files before training"
        )
    return provider
