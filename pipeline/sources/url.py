"""`data_location.Url`: token files at an address of fsspec, such as s3://bucket/folder.

Each kind of address has its library, which finds credentials in the environment by its own rules
and has its own time limits; for s3:// that is s3fs, of the extra s3. There is no checksum that all
of them give: a file's size and version are held to what was listed, and its SHA-256 is recorded.
gs:// is read as the `Gcp` location of Http is, by generation and checksum.
"""

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.net import fsspec_files
from pipeline.net.redact import hide
from pipeline.net.remote import Origin
from pipeline.runfile.data import DataUrl
from pipeline.runfile.network import Network
from pipeline.runfile.serde_enum import variant_name
from pipeline.sources import Fetched, Survey, Wanted, listed
from pipeline.sources.gcs import list_bucket

# Other addresses have locations of their own, which check more.
INSTEAD = {
    "http": "Http",
    "https": "Http",
    "hf": "Hub",
    "gs": "Http with Gcp",
    "gcs": "Http with Gcp",
}


def survey(location: DataUrl, wanted: Wanted) -> Survey:
    """What a run would read of the location."""
    return listed.survey(listing(location, wanted), wanted)


def fetch(location: DataUrl, folder: Path, wanted: Wanted) -> Fetched:
    """Fetches the token files, and their tokenizer where they have one.

    Raises:
      LockstepError: as `listing` and `listed.fetch_listed`.
    """
    return listed.fetch_listed(listing(location, wanted), folder, wanted)


def listing(location: DataUrl, wanted: Wanted) -> listed.Listing:
    """The token files at and below the address, by name.

    Raises:
      LockstepError: it is no address of fsspec, there is nothing, or it may not be read.
    """
    scheme, separator, _ = location.url.partition("://")
    if not separator or scheme in INSTEAD:
        raise LockstepError(
            f"{variant_name(location)}: found {hide(location.url)}, expected "
            f"{INSTEAD.get(scheme, 'Local')} for it; this one is for s3:// and the like"
        )
    return listed.remembered(wanted, location, lambda: _ask(location, wanted.network))


def _ask(location: DataUrl, network: Network) -> listed.Listing:
    scheme, _, place = location.url.partition("://")
    if scheme == "gs":
        bucket, _, folder = place.partition("/")
        files = list_bucket(bucket, folder, network)
    else:
        files = tuple(_by_fsspec(location.url, scheme))
    return listed.Listing(
        read=hide(location.url),
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=listed.token_files(files),
        tokenizer=listed.tokenizer_files(files),
    )


def _by_fsspec(url: str, scheme: str) -> Iterator[listed.Listed]:
    _, root = fsspec_files.find_file_system(url)
    for path, about in sorted(fsspec_files.list_files(url).items()):
        size, tag = fsspec_files.version(about)
        # of a folder the path in it; of a file its own name
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        origin = Origin(url=f"{scheme}://{path}", size=size, tag=tag)
        yield listed.Listed(name=listed.check_name(name, hide(url)), origin=origin)
