"""`data_location.Http`: token files at web addresses, or in a bucket of Google Cloud Storage.

A server that does not give a file's length is rejected, as Psyche does.
"""

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

from lockstep.errors import LockstepError, hide
from pipeline.net import remote, web
from pipeline.net.google import BucketFolder
from pipeline.runfile import Network
from pipeline.runfile.data import DataHttp, LocationGcp, LocationNumberedFiles, LocationSingleUrl
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile, held_by

FILES = 100_000  # numbered ones at most


def listing(location: DataHttp, network: Network) -> Listing:
    """Return the token files: numbered ones in the order of their numbers, a bucket's by name.

    Raises:
      LockstepError: a server cannot be reached, does not have a file, or gives no length.
    """
    match location.location:
        case LocationSingleUrl(url=url):
            read, held = hide(url), {"files": files_at([url], network)}
        case LocationNumberedFiles() as numbered:
            if numbered.num_files > FILES:
                raise LockstepError(
                    f"{hide(numbered.url_template)}: num_files is {numbered.num_files}, expected "
                    f"at most {FILES}: each needs a request for its size"
                )
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
    """Return the files in a folder of a bucket, by name, each at its generation.

    Raises:
      LockstepError: the bucket cannot be read, or its listing is invalid.
    """
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


PROVIDER = provider(listing)
