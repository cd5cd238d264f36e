"""Addresses of a run file, resolved into requests to a web server.

Credentials come from the environment, where each service's own tools look for them.
"""

import os
import re
from base64 import b64encode
from functools import lru_cache
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from lockstep.errors import LockstepError, hide, keep_secret
from pipeline.net import google_auth
from pipeline.net.connection import Request
from pipeline.net.redact import message


def resolve(url: str) -> Request:
    """Return the request for a file.

    Args:
      url: `http(s)://...`, `gs://bucket/name#generation` or
        `hf://datasets/owner/name@commit/path`, without `datasets/` for a model's.

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
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    user = _user_of(parts.hostname, path)
    if user is None:
        return Request(url, {}, hide(url))
    keep_secret(user, user.partition(":")[2])
    headers = {"Authorization": f"Basic {b64encode(user.encode()).decode()}"}
    return Request(url, headers, hide(url))


@lru_cache(maxsize=64)
def _user_of(host: str, path: str) -> str | None:
    """Return user:password of a server, as a file in the form of ~/.netrc has them."""
    try:
        entry = netrc(path).hosts.get(host)
    except FileNotFoundError:
        return None
    except (NetrcParseError, OSError, UnicodeDecodeError) as error:
        raise LockstepError(
            f"{path}: {message(error)}, expected lines `machine HOST login USER password PASSWORD`"
        ) from None
    return None if entry is None else f"{entry[0]}:{entry[2]}"


def _resolve_google(url: str) -> Request:
    parts = urlsplit(url)
    bucket, name = parts.netloc, unquote(parts.path[1:])
    path = f"/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    query = f"?alt=media&generation={parts.fragment}"
    headers = google_auth.headers(f"gs://{bucket}")
    return Request(google_auth.endpoint() + path + query, headers, f"gs://{bucket}/{name}")


def _resolve_hub(url: str) -> Request:
    from huggingface_hub import hf_hub_url

    kind, repo_id, commit, name = _parts_of_hub(url)
    address = hf_hub_url(repo_id, name, repo_type=kind, revision=commit)
    return Request(address, hub_headers(), f"{repo_id}: {name}")


def in_hub_cache(url: str, size: int) -> Path | None:
    """Return the path of a file of the hub in the cache of the hub's own client, if it is there."""
    if not url.startswith("hf://"):
        return None
    from huggingface_hub import try_to_load_from_cache

    kind, repo_id, commit, name = _parts_of_hub(url)
    found = try_to_load_from_cache(repo_id, name, revision=commit, repo_type=kind)
    if not isinstance(found, str):  # absent, or known not to be
        return None
    path = Path(found)
    return path if path.is_file() and path.stat().st_size == size else None


def _parts_of_hub(url: str) -> tuple[str, str, str, str]:
    """Return the kind, repository, commit and name of a file in an `hf://` address."""
    match = re.fullmatch(r"hf://(datasets/)?([^@]+)@([^/]+)/(.+)", url)
    return "dataset" if match[1] else "model", match[2], match[3], unquote(match[4])
