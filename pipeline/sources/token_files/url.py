"""`data_location.Url`: token files at an address of fsspec, such as s3://bucket/folder.

Each scheme has its library, with its own credentials; s3:// needs s3fs, of the
extra s3. There is no checksum that all of them give: a file is held to its listed size and version,
and its SHA-256 is recorded.
"""

from collections.abc import Iterator

from lockstep.errors import LockstepError, hide
from lockstep.tables.variant import variant_name
from pipeline.net import fsspec_files
from pipeline.net.host import check_name
from pipeline.net.origin import Origin
from pipeline.runfile import Network
from pipeline.runfile.data import DataUrl
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile, held_by

# Other addresses have locations of their own, which check more.
INSTEAD = {
    "http": "Http",
    "https": "Http",
    "hf": "Hub",
    "gs": "Http with Gcp",
    "gcs": "Http with Gcp",
}


def listing(location: DataUrl, network: Network) -> Listing:
    """Return the token files at and below the address, by name.

    Raises:
      LockstepError: fsspec does not know the address, it is empty, or it may not be read.
    """
    scheme, separator, _ = location.url.partition("://")
    if not separator or scheme in INSTEAD:
        raise LockstepError(
            f"{variant_name(location)}: found {hide(location.url)}, expected "
            f"{INSTEAD.get(scheme, 'Local')} for it; this one is for s3:// and the like"
        )
    return Listing(
        read=hide(location.url),
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        **held_by(list_files(location.url, scheme, network)),
    )


def list_files(url: str, scheme: str, network: Network) -> Iterator[LocationFile]:
    """Yield the files at and below an address of fsspec, by name."""
    _, root = fsspec_files.find_file_system(url)
    for path, info in sorted(fsspec_files.list_files(url, network).items()):
        size, tag = fsspec_files.version(info)
        # its path in a folder; a file's own name
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        origin = Origin(url=f"{scheme}://{path}", size=size, tag=tag)
        yield LocationFile(name=check_name(name, hide(url)), origin=origin)


PROVIDER = provider(listing)
