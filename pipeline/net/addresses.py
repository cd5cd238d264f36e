"""Addresses as a run file writes them, turned into what is asked of a server.

Credentials come from the environment, where each service's own tools look for them.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from pipeline.errors import LockstepError
from pipeline.net import google_auth
from pipeline.net.redact import hide, said
from pipeline.net.web import Request

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The extra that installs what fsspec needs for a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3"}


def resolve(url: str) -> Request:
    """The request for a file at `http(s)://`, `gs://bucket/name#generation` or
    `hf://datasets/owner/name@commit/path`.

    Raises:
      LockstepError: the environment names credentials that cannot be used.
    """
    match url.partition("://")[0]:
        case "gs":
            return _google(url)
        case "hf":
            return _hub(url)
        case _:
            return _plain(url)


def without_user(url: str) -> str:
    """An address without a user and password: what may be written down."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in url else url


def _plain(url: str) -> Request:
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    if not at:
        return Request(url, {}, hide(url))
    from urllib3.util import make_headers

    headers = dict(make_headers(basic_auth=unquote(user)))
    return Request(without_user(url), headers, hide(url))


def google_file(bucket: str, name: str, generation: str) -> str:
    """The address of one version of a file in a bucket."""
    return f"gs://{bucket}/{quote(name)}#{generation}"


def _google(url: str) -> Request:
    parts = urlsplit(url)
    bucket, name = parts.netloc, unquote(parts.path[1:])
    place = f"{google_auth.endpoint()}/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    asked = f"?alt=media&generation={parts.fragment}"
    return Request(place + asked, google_headers(f"gs://{bucket}"), f"gs://{bucket}/{name}")


def google_headers(name: str) -> dict[str, str]:
    """The headers of a request to a bucket.

    Raises:
      LockstepError: the environment names credentials that cannot be used.
    """
    token = google_auth.token(name)
    return {"Authorization": f"Bearer {token}"} if token else {}


def hub_file(repo_id: str, commit: str, name: str) -> str:
    """The address of a file of a dataset on the hub, at one commit."""
    return f"hf://datasets/{repo_id}@{commit}/{quote(name)}"


def _hub(url: str) -> Request:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    found = re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.+)", url)
    repo_id, commit, name = found[1], found[2], unquote(found[3])
    place = hf_hub_url(repo_id, name, repo_type="dataset", revision=commit)
    return Request(place, build_hf_headers(library_name="lockstep"), f"{repo_id}: {name}")


def of_fsspec(url: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of an address, and its path there.

    Raises:
      LockstepError: no such kind of address, or what it needs is not installed.
    """
    scheme, _, place = url.partition("://")
    files = file_system(f"{scheme}://{place.partition('/')[0]}")
    return files, files._strip_protocol(url)


@lru_cache(maxsize=8)
def file_system(url: str) -> "AbstractFileSystem":
    """One for all files of a bucket or a host: to make one takes longer than to ask it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        # of its own, and not what fsspec keeps for every user of this process
        return fsspec.core.url_to_fs(url, skip_instance_cache=True)[0]
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f"pip install -c constraints.txt -e '.[{extra}]'" if extra else str(error)
        raise LockstepError(f"{hide(url)}: not installed, expected it: {install}") from None
    except Exception as error:  # an unknown scheme, credentials that are none
        raise LockstepError(f"{hide(url)}: {said(error)}, expected an address of fsspec") from None


def listed_by_fsspec(url: str) -> dict[str, dict[str, Any]]:
    """The files at and below an address: path -> size, and what else fsspec says of each.

    Raises:
      LockstepError: there is no such place, or it cannot be read.
    """
    files, path = of_fsspec(url)
    try:
        files.invalidate_cache()
        found = files.find(path, detail=True)
    except Exception as error:
        raise LockstepError(
            f"{hide(url)}: {said(error)}, expected a folder or a file to read"
        ) from None
    return {name: about for name, about in found.items() if about["type"] == "file"}
