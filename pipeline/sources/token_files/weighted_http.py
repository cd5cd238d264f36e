"""`data_location.WeightedHttp`: several Http data locations, mixed as a JSON document says.

    {"shuffle": ..., "providers": [[location, weight], ...]}    shares by weight
    {"shuffle": ..., "providers": [location, ...]}              shares by length

A location is written as `[model.LLM.data_location.Http]` of a run file. mixture.py decides which
sequence comes where; `shuffle` then orders all of them, and each location's own shuffle its own.
"""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from lockstep.errors import LockstepError, hide
from lockstep.tables.explain import validate
from lockstep.tables.table import AsTuple, Table
from pipeline.net import remote, web
from pipeline.runfile import Network
from pipeline.runfile.data import AnyShuffle, DataHttp, DataWeightedHttp
from pipeline.sources.token_files import http
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile
from pipeline.tokens.shards import Part

Weight = Annotated[float, Field(gt=0)]


def _form(providers: Any) -> str:
    paired = isinstance(providers, tuple) and isinstance(next(iter(providers), None), list | tuple)
    return "weighted" if paired else "plain"


class WeightedConfig(Table):
    """The JSON document."""

    shuffle: AnyShuffle
    """Order of all sequences."""
    providers: Annotated[
        Annotated[tuple[Annotated[tuple[DataHttp, Weight], AsTuple], ...], Tag("weighted")]
        | Annotated[tuple[DataHttp, ...], Tag("plain")],
        Discriminator(_form),
        AsTuple,
        Field(min_length=1),
    ]
    """The locations: all with a weight, or all without."""


def listing(location: DataWeightedHttp, network: Network) -> Listing:
    """Return the token files of all locations, each file with the number of its location.

    Raises:
      LockstepError: the document is invalid, its locations differ in token size, or as
        `http.listing`.
    """
    name = hide(location.url)
    document, _ = web.Pages(network).get(remote.resolve_web(location.url))
    config = validate(WeightedConfig, document, f"{name}: invalid weighted configuration")
    weighted = [pair if isinstance(pair, tuple) else (pair, None) for pair in config.providers]
    sizes = {one.token_size_in_bytes for one, _ in weighted}
    if len(sizes) > 1:
        raise LockstepError(
            f"{name}: found tokens of {' and '.join(sorted(sizes))}, expected one token size"
        )
    count = sum(getattr(one.location, "num_files", 1) for one, _ in weighted)
    if count > http.FILES:
        raise LockstepError(
            f"{name}: has {count} files, expected at most {http.FILES}: each needs a request for "
            "its size"
        )
    files: list[LocationFile] = []
    tokenizer: tuple[LocationFile, ...] = ()
    beside: tuple[LocationFile, ...] = ()
    for number, (one, _) in enumerate(weighted):
        part = http.listing(one, network)
        if not part.files:
            raise LockstepError(f"{part.read}: found no token files, expected some")
        tokenizer = tokenizer or part.tokenizer
        beside += tuple(file.model_copy(update={"part": number}) for file in part.beside)
        files += [file.model_copy(update={"part": number}) for file in part.files]
    return Listing(
        read=name,
        token_size_in_bytes=sizes.pop(),
        shuffle=config.shuffle,
        files=tuple(files),
        tokenizer=tokenizer,
        beside=beside,
        parts=tuple(Part(shuffle=one.shuffle, weight=weight) for one, weight in weighted),
    )


PROVIDER = provider(listing)
