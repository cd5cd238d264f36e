"""`data_location.Http` and `WeightedHttp`: token files at web addresses, or in a Google bucket.

A server that does not give a file's length is rejected, as Psyche does. `WeightedHttp` mixes
several Http locations, as a JSON document says:

    {"shuffle": ..., "providers": [[location, weight], ...]}    shares by weight
    {"shuffle": ..., "providers": [location, ...]}              shares by length

A location is written as `[model.LLM.data_location.Http]` of a run file. mixture.py decides which
sequence comes where; `shuffle` then orders all of them, and each location's own shuffle its own.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import Discriminator, Field, Tag

from lockstep.errors import LockstepError, hide
from lockstep.tables.explain import validate
from lockstep.tables.table import AsTuple, Table
from pipeline.net import remote, web
from pipeline.net.google import BucketFolder
from pipeline.runfile import Network
from pipeline.runfile.data import (
    AnyShuffle,
    DataHttp,
    DataWeightedHttp,
    LocationGcp,
    LocationNumberedFiles,
    LocationSingleUrl,
)
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile, held_by
from pipeline.tokens.shards import Part

FILES = 100_000  # numbered ones at most
Weight = Annotated[float, Field(gt=0)]


def listing(location: DataHttp | DataWeightedHttp, network: Network) -> Listing:
    """Return the token files: numbered ones in the order of their numbers, a bucket's by name.

    Raises:
      LockstepError: a server cannot be reached, does not have a file, or gives no length; or the
        document of a mixture is invalid, or its locations differ in token size.
    """
    if isinstance(location, DataWeightedHttp):
        return _weighted(location, network)
    match location.location:
        case LocationSingleUrl(url=url):
            read, held = hide(url), {"files": files_at([url], network)}
        case LocationNumberedFiles() as numbered:
            _check_count(numbered.num_files, f"{hide(numbered.url_template)}: num_files is")
            urls = [
                numbered.url_template.replace("{}", str(number).zfill(numbered.n_left_pad_zeros))
                for number in range(numbered.start_index, numbered.start_index + numbered.num_files)
            ]
            read, held = hide(numbered.url_template), {"files": files_at(urls, network)}
        case LocationGcp(bucket_name=bucket, filter_directory=folder):
            read = f"gs://{bucket}/{folder}".rstrip("/")
            held = held_by(list_bucket(bucket, folder, network))
    return Listing(
        read=read,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        **held,
    )


def files_at(urls: list[str], network: Network) -> tuple[LocationFile, ...]:
    """Return the files at web addresses, with the size and version that the servers give."""
    requests = [remote.resolve_web(url) for url in urls]
    with ThreadPoolExecutor(network.connections) as pool:
        origins = list(pool.map(lambda request: web.head(request, network), requests))
    return tuple(
        LocationFile(
            name=unquote(urlsplit(origin.url).path).rpartition("/")[2] or hide(origin.url),
            origin=origin,
        )
        for origin in origins
    )


def list_bucket(bucket: str, folder: str, network: Network) -> tuple[LocationFile, ...]:
    """Return the files in a folder of a bucket, by name, each at its generation."""
    found = BucketFolder(bucket, folder, network)
    files = found.files(below=True)
    if not files:
        raise LockstepError(
            f"{found.name}: found no files, expected some in this folder of the bucket"
        )
    return tuple(
        LocationFile(name=name, origin=found.origin(name, file))
        for name, file in sorted(files.items())
    )


def _check_count(count: int, found: str) -> None:
    if count > FILES:
        raise LockstepError(
            f"{found} {count}, expected at most {FILES}: each needs a request for its size"
        )


# ---- A mixture ----


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


def _weighted(location: DataWeightedHttp, network: Network) -> Listing:
    """Return the token files of all locations, each file with the number of its location."""
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
    _check_count(count, f"{name}: number of files is")
    listings = [listing(one, network) for one, _ in weighted]
    for part in listings:
        if not part.files:
            raise LockstepError(f"{part.read}: found no token files, expected some")

    def numbered(field: str) -> tuple[LocationFile, ...]:
        return tuple(
            file.model_copy(update={"part": number})
            for number, part in enumerate(listings)
            for file in getattr(part, field)
        )

    return Listing(
        read=name,
        token_size_in_bytes=sizes.pop(),
        shuffle=config.shuffle,
        files=numbered("files"),
        tokenizer=next((part.tokenizer for part in listings if part.tokenizer), ()),
        beside=numbered("beside"),
        parts=tuple(Part(shuffle=one.shuffle, weight=weight) for one, weight in weighted),
    )


PROVIDER = provider(listing)
