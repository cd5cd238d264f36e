"""Bytes of one version of a file, wherever it is: on a web server, a cloud, or this machine.

`https://` and `http://` go to the server as they stand; `gs://bucket/name#generation` is Google
Cloud Storage, `hf://datasets/owner/name@commit/path` the Hugging Face hub; a path is a file of this
machine, and fsspec reads every other address. Credentials come from the environment, where each
service's own tools look for them.
"""

import os
import re
from base64 import b64encode
from collections.abc import Iterator
from functools import lru_cache
from netrc import NetrcParseError, netrc
from pathlib import Path
from threading import Event
from urllib.parse import quote, unquote, urlsplit

from . import fsspec_files, google, limits, web
from .errors import AGENT, NetError, hide, keep_secret, message
from .limits import Attempts, NetSettings, TransientError
from .origin import Origin
from .web import Request


def read(
    origin: Origin,
    start: int,
    stop: int,
    network: NetSettings,
    cancelled: Event | None = None,
    *,
    is_only_read: bool = False,
    checked: bool = False,
) -> Iterator[bytes]:
    """Yield a remote file's bytes from `start` to `stop`; a broken connection is resumed.

    A part of a file of the hub is read from the cache of its client, if that has the file.
    `is_only_read` says that nothing is read of the file but what this yields. Then the first answer
    may be of any one version; every other answer must name it, or they could be of several.
    `checked` says that a SHA-256 of the whole decides in the end: then no answer need name it.

    Raises:
      UnnamedVersionError: an answer that must name its version does not.
      NetError: the server refuses, has another version of the file, or failed too often.
      CancelledError: `cancelled` was set.
    """
    if not is_only_read and (cached := in_hub_cache(origin)) is not None:
        tag = str(cached.stat().st_mtime_ns)
        yield from _read_local(Origin(url=str(cached), size=origin.size, tag=tag), start, stop)
        return
    attempts = Attempts(network, cancelled)
    attempts.check()
    while start < stop:
        try:
            is_rest, first = (start > 0 or not is_only_read) and not checked, start
            for piece in read_once(origin, start, stop, network, is_rest):
                start += len(piece)
                if start > stop:
                    raise NetError(
                        f"{hide(origin.url)}: {start - stop} bytes more than requested, expected "
                        f"them up to offset {stop}"
                    )
                yield piece
                attempts.check()  # only now: what came is not fetched again
            if start < stop:
                raise TransientError(f"{hide(origin.url)}: the answer ended early")
        except TransientError as error:
            if start - first >= min(limits.LEAST_BYTES, (stop - first) / 2):  # no drip
                attempts.progressed()
            attempts.failed(
                error,
                f"{stop - start} more bytes within {network.attempts} attempts; run again to "
                "resume",
            )


def read_once(
    origin: Origin, start: int, stop: int, network: NetSettings, is_rest: bool
) -> Iterator[bytes]:
    """Yield a remote file's bytes from `start` to `stop`, without a second attempt.

    `is_rest` says whether the answer must name the version of the file.

    Raises:
      TransientError: the connection was cut or stalled, or the server is busy; the pieces so far
        are right.
      UnnamedVersionError: it must name the version, and does not.
      NetError: the server refuses, or has another version of the file.
    """
    if origin.is_local:
        return _read_local(origin, start, stop)
    scheme = origin.url.partition("://")[0]
    if scheme not in ("http", "https", "gs", "hf"):
        return fsspec_files.read(origin, start, stop, network, is_rest=is_rest)
    request = resolve(origin.url)  # each time: credentials expire
    return web.read(request, origin, start, stop, network, is_rest=is_rest)


def _read_local(origin: Origin, start: int, stop: int) -> Iterator[bytes]:
    path = Path(origin.url)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while start < stop and (piece := file.read(min(web.PIECE_BYTES, stop - start))):
                stat = os.fstat(file.fileno())  # after the read, to hold for it
                if (stat.st_size, str(stat.st_mtime_ns)) != (origin.size, origin.tag):
                    raise NetError(
                        f"{path}: changed since it was listed: {stat.st_size} bytes of time "
                        f"{stat.st_mtime_ns}, expected {origin.size} of {origin.tag}; run again "
                        "to read it anew"
                    )
                start += len(piece)
                yield piece
    except OSError as error:
        raise NetError(f"{path}: {error.strerror}, expected a readable file") from error
    if start < stop:
        raise NetError(f"{path}: cut short while it was read, expected {stop} bytes")


# ---- Addresses ----


def resolve(url: str) -> Request:
    """Return the request for a remote file on a web server, in a bucket or on the hub."""
    match url.partition("://")[0]:
        case "gs":
            return _resolve_google(url)
        case "hf":
            return _resolve_hub(url)
        case _:
            return resolve_web(url)


def hub_headers() -> dict[str, str]:
    """Return the headers of a request for a remote file of the hub, with the token."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name=AGENT.partition("/")[0])


def resolve_web(url: str) -> Request:
    """Return the request for a remote file on a web server."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme if parts.hostname else "no server"
    except ValueError as error:
        scheme = str(error)
    if scheme not in ("http", "https"):
        raise NetError(
            f"{hide(url)}: found {scheme or 'no scheme'}, expected http:// or https:// and a server"
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
    """Return user:password for a server, from a file in the form of ~/.netrc."""
    try:
        entry = netrc(path).hosts.get(host)
    except FileNotFoundError:
        return None
    except (NetrcParseError, OSError, UnicodeDecodeError) as error:
        raise NetError(
            f"{path}: {message(error)}, expected lines `machine HOST login USER password PASSWORD`"
        ) from None
    return None if entry is None else f"{entry[0]}:{entry[2]}"


def _resolve_google(url: str) -> Request:
    parts = urlsplit(url)
    bucket, name = parts.netloc, unquote(parts.path[1:])
    path = f"/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
    query = f"?alt=media&generation={parts.fragment}"
    headers = google.authorization(f"gs://{bucket}")
    return Request(google.endpoint() + path + query, headers, f"gs://{bucket}/{name}")


def _resolve_hub(url: str) -> Request:
    from huggingface_hub import hf_hub_url

    kind, repo_id, commit, name = _parts_of_hub(url)
    address = hf_hub_url(repo_id, name, repo_type=kind, revision=commit)
    return Request(address, hub_headers(), f"{repo_id}: {name}")


def in_hub_cache(origin: Origin) -> Path | None:
    """Return the path of a file in the cache of the hub's own client, if it has the file."""
    if not origin.url.startswith("hf://"):
        return None
    from huggingface_hub import try_to_load_from_cache

    kind, repo_id, commit, name = _parts_of_hub(origin.url)
    cached = try_to_load_from_cache(repo_id, name, revision=commit, repo_type=kind)
    if not isinstance(cached, str):  # absent, or known not to exist
        return None
    path = Path(cached)
    return path if path.is_file() and path.stat().st_size == origin.size else None


def _parts_of_hub(url: str) -> tuple[str, str, str, str]:
    """Kind, repository, commit and name of a file in `hf://`."""
    match = re.fullmatch(r"hf://(datasets/)?([^@]+)@([^/]+)/(.+)", url)
    return "dataset" if match[1] else "model", match[2], match[3], unquote(match[4])
