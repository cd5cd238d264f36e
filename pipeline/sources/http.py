"""`data_location.Http`: token files at web addresses, or in a bucket of Google Cloud Storage.

Their lengths are asked for first; a server that gives none is refused, as Psyche does.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.net import addresses, web
from pipeline.net.redact import hide
from pipeline.net.remote import Origin
from pipeline.runfile.data import DataHttp, LocationGcp, LocationNumberedFiles, LocationSingleUrl
from pipeline.runfile.network import Network
from pipeline.sources import Fetched, Survey, Wanted, listed
from pipeline.sources.gcs import list_bucket


def survey(location: DataHttp, wanted: Wanted) -> Survey:
    """What a run would read of the location."""
    return listed.survey(listing(location, wanted), wanted)


def fetch(location: DataHttp, folder: Path, wanted: Wanted) -> Fetched:
    """Fetches the token files.

    Raises:
      LockstepError: as `listing` and `listed.fetch_listed`.
    """
    return listed.fetch_listed(listing(location, wanted), folder, wanted)


def listing(location: DataHttp, wanted: Wanted) -> listed.Listing:
    """The location's token files: numbered ones in the order of their numbers, a bucket's by name.

    Raises:
      LockstepError: a server cannot be reached, has no such file, or gives no length.
    """
    return listed.remembered(wanted, location, lambda: ask(location, wanted.network))


def ask(location: DataHttp, network: Network) -> listed.Listing:
    """What the servers say of the location now; errors as `listing`."""
    tokenizer = ()
    match location.location:
        case LocationSingleUrl(url=url):
            read, files = hide(url), files_at([url], network)
        case LocationNumberedFiles() as numbered:
            urls = [
                numbered.url_template.replace("{}", str(number).zfill(numbered.n_left_pad_zeros))
                for number in range(numbered.start_index, numbered.start_index + numbered.num_files)
            ]
            read, files = hide(numbered.url_template), files_at(urls, network)
        case LocationGcp(bucket_name=bucket, filter_directory=folder):
            read = f"gs://{bucket}/{folder}".rstrip("/")
            found = list_bucket(bucket, folder, network)
            files, tokenizer = listed.token_files(found), listed.tokenizer_files(found)
    return listed.Listing(
        read=read,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=files,
        tokenizer=tokenizer,
    )


def files_at(urls: list[str], network: Network) -> tuple[listed.Listed, ...]:
    """The files at web addresses, with the size and version that the servers say, in order.

    Raises:
      LockstepError: a server cannot be reached, has no such file, or gives no length.
    """
    with ThreadPoolExecutor(network.connections) as pool:
        heads = list(pool.map(lambda url: web.head(addresses.resolve(url), network), urls))
    return tuple(
        listed.Listed(
            name=unquote(urlsplit(url).path).rpartition("/")[2] or hide(url),
            origin=Origin(url=url, size=head.size, tag=head.tag, checksum=head.checksum),
        )
        for url, head in zip(urls, heads, strict=True)
    )
