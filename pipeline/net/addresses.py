"""Addresses of a run file, resolved into requests to a web server.

Credentials come from the environment, where each service's own tools look for them.
"""

import re
from urllib.parse import quote, unquote, urlsplit

from urllib3.util import make_headers

from pipeline.errors import LockstepError, hide, keep_secret
from pipeline.net import google_auth
from pipeline.net.connection import Request


def resolve(url: str) -> Request:
    """Return the request for a file.

    Args:
      url: `http(s)://...`, `gs://bucket/name#generation` or
        `hf://datasets/owner/name@commit/path`.

    Raises:
      LockstepError: the environment names credentials that cannot be used.
    """
    match url.partition("://")[0]:
        case "gs":
            return _resolve_google(url)
        case "hf":
            return _resolve_hub(url)
        case _:
            return resolve_web(url)


def without_user(url: str) -> str:
    """Return an address without user and password, fit to be written down."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in url else url


def hub_headers() -> dict[str, str]:
    """Return the headers of a request to the hub, with the environment's token."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="lockstep")


def resolve_web(url: str) -> Request:
    """Return the request for a file on a web server.

    Raises:
      LockstepError: it is no address of one.
    """
    try:
        parts = urlsplit(url)
        found = parts.scheme if parts.hostname else "no server"
    except ValueError as error:
        found = str(error)
    if found not in ("http", "https"):
        raise LockstepError(
            f"{hide(url)}: found {found or 'no scheme'}, expected http:// or https:// and a server"
        )
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    headers = dict(make_headers(basic_auth=unquote(user))) if at else {}
    keep_secret(user, *unquote(user).split(":", 1)[1:])
    return Request(without_user(url), headers, hide(url))


def _resolve_google(url: str) -> Request:
    parts = urlsplit(url)
    bucket, name = parts.netloc, unquote(parts.path[1:])
    path = f"/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    query = f"?alt=media&generation={parts.fragment}"
    headers = google_auth.headers(f"gs://{bucket}")
    return Request(google_auth.endpoint() + path + query, headers, f"gs://{bucket}/{name}")


def _resolve_hub(url: str) -> Request:
    from huggingface_hub import hf_hub_url

    match = re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.+)", url)
    repo_id, commit, name = match[1], match[2], unquote(match[3])
    address = hf_hub_url(repo_id, name, repo_type="dataset", revision=commit)
    return Request(address, hub_headers(), f"{repo_id}: {name}")
