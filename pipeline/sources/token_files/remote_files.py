"""Remote token files: at web addresses, in buckets, on the hub, or at an address of fsspec.

`Http` has files at web addresses, or in a bucket of Google Cloud Storage. A server that does not
give a file's length is rejected, as Psyche does. `WeightedHttp` mixes several Http locations, as a
JSON document says:

    {"shuffle": ..., "providers": [[location, weight], ...]}    shares by weight
    {"shuffle": ..., "providers": [location, ...]}              shares by length

A location is written as `[model.LLM.data_location.Http]` of a run file. mixture.py decides which
sequence comes where; `shuffle` then orders all of them, and each location's own shuffle its own.

`Hub` is a dataset on the Hugging Face hub, at one commit. $HF_ENDPOINT names the hub, and $HF_TOKEN
(or a login of the hub's client) the user.

`Url` is an address of fsspec, such as s3://bucket/folder. Each scheme has its library, with its
own credentials; s3:// needs s3fs, of the extra s3. There is no checksum that all of them give: a
file is held to its listed size and version, and its SHA-256 is recorded.
"""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Annotated, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import Discriminator, Field, Tag

from lockstep.errors import LockstepError, hide
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.validation import validate
from lockstep.tables.variant import variant_name
from pipeline.net import fsspec_files, remote, web
from pipeline.net.errors import check_name
from pipeline.net.google import BucketFolder
from pipeline.net.origin import Origin
from pipeline.net.transfers import hub_files
from pipeline.runfile import Network
from pipeline.runfile.data import (
    AnyShuffle,
    DataHttp,
    DataHub,
    DataUrl,
    DataWeightedHttp,
    LocationGcp,
    LocationNumberedFiles,
    LocationSingleUrl,
)
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile, listing_fields
from pipeline.tokens.shards import Part

log = logging.getLogger(__name__)

REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MOST_FILES = 100_000  # numbered ones at most
Weight = Annotated[float, Field(gt=0)]


# Addresses that have locations of their own, which check more.
INSTEAD = {
    "http": "Http",
    "https": "Http",
    "hf": "Hub",
    "gs": "Http with Gcp",
    "gcs": "Http with Gcp",
}
Elsewhere: TypeAlias = DataHttp | DataWeightedHttp | DataHub | DataUrl


def listing(location: Elsewhere, network: Network) -> Listing:
    """Return the token files: numbered ones in the order of their numbers, others by name.

    Raises:
      LockstepError: a server cannot be reached, does not have a file, or gives no length.
    """
    where = variant_name(location)
    match location:
        case DataWeightedHttp():
            return _mixture(location, network)
        case DataHttp(location=LocationSingleUrl(url=url)):
            read, fields = hide(url), {"files": files_at([url], network)}
        case DataHttp(location=LocationNumberedFiles() as numbered):
            read = hide(numbered.url_template)
            _check_count(numbered.num_files, f"{read}: num_files is")
            urls = [
                numbered.url_template.replace("{}", str(number).zfill(numbered.n_left_pad_zeros))
                for number in range(numbered.start_index, numbered.start_index + numbered.num_files)
            ]
            fields = {"files": files_at(urls, network)}
        case DataHttp(location=LocationGcp(bucket_name=bucket, filter_directory=folder)):
            read = f"gs://{bucket}/{folder}".rstrip("/")
            fields = listing_fields(list_bucket(bucket, folder, network))
        case DataHub(repo_id=name, revision=revision, patterns=patterns):
            says, files = list_dataset(name, revision, f"{where}: {name}", network, key="revision")
            matching = [file for file in files if any(fnmatch(file.name, p) for p in patterns)]
            read, fields = f"{name} on the hub", listing_fields(files)
            fields |= {"files": tuple(matching), "says": says}
        case DataUrl(url=url):
            read, (scheme, separator, _) = hide(url), url.partition("://")
            if not separator or scheme in INSTEAD:
                raise LockstepError(
                    f"{where}: found {read}, expected data_location.{INSTEAD.get(scheme, 'Local')} "
                    "for it; Url is for s3:// and the like"
                )
            fields = listing_fields(list_files(url, scheme, network))
    return Listing(
        read=read,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        **fields,
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
    bucket_folder = BucketFolder(bucket, folder, network)
    files = bucket_folder.files(below=True)
    if not files:
        raise LockstepError(
            f"{bucket_folder.name}: found no files, expected some in this folder of the bucket"
        )
    return tuple(
        LocationFile(name=name, origin=bucket_folder.origin(name, file))
        for name, file in sorted(files.items())
    )


def list_dataset(
    repo_id: str, revision: str | None, where: str, network: Network, key: str | None = None
) -> tuple[dict[str, str], tuple[LocationFile, ...]]:
    """Return a dataset's name and commit, as shards.json has them, and its files by name.

    `key` is the run file's for the revision, if it has one: a revision that may move is warned of.
    """
    listed = hub_files.list_repo(f"datasets/{repo_id}", revision, where, network)
    if key is not None and revision != listed.commit:
        advice = hub_files.pin_advice(where, listed.commit, key)
        log.warning(f"download: warning: {advice}")
    files = [LocationFile(name=name, origin=origin) for name, origin in listed.files.items()]
    says = {"repo_id": repo_id, "commit": listed.commit}
    return says, tuple(sorted(files, key=lambda file: file.name))


def list_files(url: str, scheme: str, network: Network) -> Iterator[LocationFile]:
    """Yield the files at and below an address of fsspec, by name."""
    _, root = fsspec_files.find_file_system(url)
    for path, info in sorted(fsspec_files.list_files(url, network).items()):
        size, tag = fsspec_files.version(info)
        # its path in a folder; a file's own name
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        origin = Origin(url=f"{scheme}://{path}", size=size, tag=tag)
        yield LocationFile(name=check_name(name, hide(url)), origin=origin)


def _check_count(count: int, subject: str) -> None:
    if count > MOST_FILES:
        raise LockstepError(
            f"{subject} {count}, expected at most {MOST_FILES}: each needs a request for its size"
        )


# ---- A mixture ----


def _form(providers: Any) -> str:
    paired = isinstance(providers, tuple) and isinstance(next(iter(providers), None), list | tuple)
    return "weighted" if paired else "plain"


class WeightedConfig(Table):
    """The JSON document that weighs Http data locations, for Psyche's WeightedHttp."""

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


def _mixture(location: DataWeightedHttp, network: Network) -> Listing:
    """Return the token files of all locations, each file with the number of its location."""
    name = hide(location.url)
    document, _ = web.Pages(network).get(remote.resolve_web(location.url))
    config = validate(WeightedConfig, document, f"{name}: invalid weighted configuration")
    weighted = [pair if isinstance(pair, tuple) else (pair, None) for pair in config.providers]
    sizes = {source.token_size_in_bytes for source, _ in weighted}
    if len(sizes) > 1:
        raise LockstepError(
            f"{name}: found tokens of {' and '.join(sorted(sizes))}, expected one token size"
        )
    count = sum(getattr(source.location, "num_files", 1) for source, _ in weighted)
    _check_count(count, f"{name}: number of files is")
    listings = [listing(source, network) for source, _ in weighted]
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
        parts=tuple(Part(shuffle=source.shuffle, weight=weight) for source, weight in weighted),
    )


PROVIDER = provider(listing)
