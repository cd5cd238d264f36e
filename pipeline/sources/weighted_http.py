"""`data_location.WeightedHttp`: several Http data locations, mixed as a JSON document says.

    {"shuffle": ..., "providers": [[location, weight], ...]}    shares by weight
    {"shuffle": ..., "providers": [location, ...]}              shares by length

A location is what `[model.LLM.data_location.Http]` is in a run file. mixture.py says which sequence
comes where; `shuffle` then orders all of them, and each location's own shuffle its own.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pipeline.errors import LockstepError
from pipeline.net import addresses, web
from pipeline.net.redact import hide
from pipeline.runfile.data import AnyShuffle, DataHttp, DataWeightedHttp
from pipeline.runfile.explain import validate
from pipeline.runfile.network import Network
from pipeline.runfile.table import AsTuple, Table
from pipeline.sources import Fetched, Survey, Wanted, http, listed
from pipeline.tokens.shards import Part

Weight = Annotated[float, Field(gt=0)]


def _form(providers: Any) -> str:
    paired = isinstance(providers, tuple) and isinstance(next(iter(providers), None), list | tuple)
    return "weighted" if paired else "plain"


class Document(Table):
    """What the JSON says."""

    shuffle: AnyShuffle
    """Of all sequences."""
    providers: Annotated[
        Annotated[tuple[Annotated[tuple[DataHttp, Weight], AsTuple], ...], Tag("weighted")]
        | Annotated[tuple[DataHttp, ...], Tag("plain")],
        Discriminator(_form),
        AsTuple,
        Field(min_length=1),
    ]
    """What is mixed: all with a weight, or all without."""


def survey(location: DataWeightedHttp, wanted: Wanted) -> Survey:
    """What a run would read of the locations."""
    return listed.survey(listing(location, wanted), wanted)


def fetch(location: DataWeightedHttp, folder: Path, wanted: Wanted) -> Fetched:
    """Fetches the token files of all locations.

    Raises:
      LockstepError: as `listing` and `listed.fetch_listed`.
    """
    return listed.fetch_listed(listing(location, wanted), folder, wanted)


def listing(location: DataWeightedHttp, wanted: Wanted) -> listed.Listing:
    """The token files of all locations, each file with its part.

    Raises:
      LockstepError: the document is none, its locations differ in token size, or as `http.listing`.
    """
    return listed.remembered(wanted, location, lambda: _ask(location, wanted.network))


def _ask(location: DataWeightedHttp, network: Network) -> listed.Listing:
    request = addresses.resolve(location.url)
    document = parse(web.get_json(request, network), hide(location.url))
    weighted = [pair if isinstance(pair, tuple) else (pair, None) for pair in document.providers]
    files: list[listed.Listed] = []
    tokenizer: tuple[listed.Listed, ...] = ()
    sizes = {one.token_size_in_bytes for one, _ in weighted}
    if len(sizes) > 1:
        raise LockstepError(
            f"{hide(location.url)}: found tokens of {' and '.join(sorted(sizes))}, expected one "
            "token size in a run"
        )
    for number, (one, _) in enumerate(weighted):
        found = http.ask(one, network)
        if not found.files:
            raise LockstepError(f"{found.read}: found no token files, expected some")
        tokenizer = tokenizer or found.tokenizer
        files += [file.model_copy(update={"part": number}) for file in found.files]
    return listed.Listing(
        read=hide(location.url),
        token_size_in_bytes=sizes.pop(),
        shuffle=document.shuffle,
        files=tuple(files),
        tokenizer=tokenizer,
        parts=tuple(Part(shuffle=one.shuffle, weight=weight) for one, weight in weighted),
    )


def parse(document: Any, where: str) -> Document:
    """Validates what the JSON says.

    Raises:
      LockstepError: it is not of that form.
    """
    return validate(Document, document, f"{where}: invalid weighted configuration")
