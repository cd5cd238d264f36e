"""Where shards come from: one provider for each data location, named in one table.

The room `token_files` has the locations whose files hold tokens already, `text` those that are
tokenized here. Each module has one constant, `PROVIDER`; a part has those of its locations. All
that is refused of a location is a LockstepError.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from lockstep.errors import LockstepError
from lockstep.tables.variant import variant_name
from pipeline.joints import Joint
from pipeline.runfile import data
from pipeline.sources.provider import Fetched, FetchOptions, Provider, Survey

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
    provider = _provider(type(location))
    if options and options.stream and not provider.streams:
        raise LockstepError(
            f"download.stream is true, expected false with {variant_name(location)}: it is made "
            "into token files before training"
        )
    return provider


def _provider(kind: type[data.Data]) -> Provider:
    for part in SOURCES:
        if kind in part.PROVIDERS:
            return part.PROVIDERS[kind]
    return import_module(f"{__name__}.{PROVIDERS[kind]}").PROVIDER
