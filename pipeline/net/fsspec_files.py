"""Files at any address of fsspec, whose file systems find credentials and retry on their own.

They set no limit that holds, so each call of one is given a time (`_within`), a listing is asked
for page by page or folder by folder, and a file in ranges: long ones, and shorter ones from a store
that gives none of those in time.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import limits
from .errors import HIDDEN, NetError, brief, hide, keep_secret, lacking, message, reveals
from .limits import NetSettings, TransientError, UnnamedVersionError, UnreachableError
from .origin import Origin
from .web import check_online

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MODULES = {"s3": "s3fs", "s3a": "s3fs"}  # scheme -> its library, where an extra has it
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# The longest request is what a broken connection can cost; the shortest must end in a stall's time.
REQUEST_BYTES, LEAST_REQUEST_BYTES = 2**24, 2**16
SETUP_SECONDS = 60.0  # the most that finding credentials may take
LONGEST_TAG = 1024  # characters
S3_PIECE_BYTES = 2**16  # of a listing, read at once
# Where file systems put a file's version, in the order in which it is looked for.
TAGS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modificationTime", "created")

_lengths: dict[int, int] = {}  # a file system's id -> bytes of a request that came in time


def find_file_system(url: str) -> "tuple[AbstractFileSystem, str]":
    """Return fsspec's file system of an address, and the path in it."""
    files = file_system("/".join(url.split("/")[:3]))
    return files, files._strip_protocol(url)


@lru_cache(maxsize=8)
def file_system(url: str) -> "AbstractFileSystem":
    """Return fsspec's file system of a bucket or host: making one takes longer than a request."""
    import fsspec

    keep_secret(*map(os.environ.get, SECRETS))
    try:
        # not the instance that fsspec shares with every user of this process
        files = fsspec.core.url_to_fs(url, skip_instance_cache=True, **_settings(url))[0]
        if hasattr(files, "call_s3"):  # reads its definitions and the credentials
            _within(SETUP_SECONDS, files, "connect")
        return files
    except ImportError as error:
        if module := MODULES.get(url.partition("://")[0]):
            raise lacking(hide(url), module) from None
        raise NetError(f"{hide(url)}: library not installed, expected it: {error}") from None
    except Exception as error:  # an unknown scheme, invalid credentials
        raise NetError(f"{hide(url)}: {message(error)}, expected an address of fsspec") from None


def _settings(url: str) -> dict[str, Any]:
    """Return the arguments of fsspec's file system, beside the environment's and the user's."""
    if url.partition("://")[0] not in MODULES:
        return {}
    import fsspec
    import s3fs  # noqa: F401  its error says what to install, where that of what it uses would not

    user_config = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    signing = {"signature_version": "s3v4"}  # of addresses too, for which botocore has an older one
    return {"config_kwargs": signing | user_config | {"http_session_cls": _limited_session()}}


def list_files(url: str, network: NetSettings) -> dict[str, dict[str, Any]]:
    """Return the files at and below an address: path -> fsspec's description."""
    name, (files, path) = hide(url), find_file_system(url)
    check_online(name)
    limit = limits.ListingLimit(name)
    list_below = _list_bucket if hasattr(files, "call_s3") else _list_folders
    infos: dict[str, dict[str, Any]] = {}
    try:
        files.invalidate_cache()
        for info in list_below(files, path, limit, network):
            limit.received(len(info["name"]))
            infos[info["name"]] = info
        if not infos and (info := _ask(files, network, "info", path))["type"] == "file":
            infos[info["name"]] = info
    except TimeoutError:
        raise UnreachableError(
            f"{name}: timed out, expected an answer within {_patience(network):.4g} s; run again"
        ) from None
    except NetError as error:
        raise NetError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
    except Exception as error:
        raise NetError(f"{name}: {_text(error)}, expected a readable folder or file") from None
    for info in infos.values():
        _check(info, name)
    return infos


def _list_bucket(
    files: "AbstractFileSystem", path: str, limit: limits.ListingLimit, network: NetSettings
) -> Iterator[dict[str, Any]]:
    """Yield the files below a folder of S3, which s3fs would list without end."""
    bucket, key, _ = files.split_path(path)
    request = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}
    token = ""
    while True:
        limit.next_page(token)
        continuation = {"ContinuationToken": token} if token else {}
        page = _ask(files, network, "call_s3", "list_objects_v2", **request, **continuation)
        for entry in page.get("Contents", []):
            if not entry["Key"].endswith("/"):  # a folder, as some tools leave them
                name = f"{bucket}/{entry['Key']}"
                yield entry | {"name": name, "size": entry["Size"], "type": "file"}
        if not page.get("IsTruncated"):
            return
        token = page.get("NextContinuationToken", "")


def _list_folders(
    files: "AbstractFileSystem", path: str, limit: limits.ListingLimit, network: NetSettings
) -> Iterator[dict[str, Any]]:
    """Yield the files below a folder, one folder after the other; a file is not below itself."""
    if _ask(files, network, "info", path)["type"] == "file":
        return
    folders = [path]
    while folders:
        folder = folders.pop()
        limit.next_page(folder)
        for info in _ask(files, network, "ls", folder, detail=True):
            if info["type"] == "directory" and info["name"] != folder:
                limit.received(len(info["name"]))
                folders.append(info["name"])
            elif info["type"] == "file":
                yield info


def _check(info: dict[str, Any], name: str) -> None:
    """Check fsspec's description of a file, which is written down."""
    size, tag = version(info)
    if not (isinstance(size, int) and size >= 0):
        raise NetError(f"{name}: lists a file of {brief(str(size))} bytes, expected its size")
    if tag is not None and (reveals(tag) or len(tag) > LONGEST_TAG):
        raise NetError(f"{name}: names version {brief(repr(tag))}, expected an ETag or a date")


def version(info: dict) -> tuple[int, str | None]:
    """Return the size and the version in fsspec's description of a file."""
    tag = next((info[key] for key in TAGS if info.get(key)), None)
    return info["size"], None if tag is None else str(tag)


def read(
    origin: Origin, start: int, stop: int, network: NetSettings, *, is_rest: bool
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop` of one version of a file, by fsspec.

    `is_rest` says whether they complete what was read before.

    Raises:
      TransientError: whatever goes wrong in the library, or takes longer than a stall.
      UnnamedVersionError: the file system names no version, and more than one request is needed.
      NetError: the file cannot be read, or is another version.
    """
    name, (files, path) = hide(origin.url), find_file_system(origin.url)
    if origin.tag is None and (is_rest or stop - start > REQUEST_BYTES):
        raise UnnamedVersionError(
            f"{name}: the file system does not say which version of the file a part belongs to, "
            f"expected one of {', '.join(TAGS)}"
        )
    while start < stop:
        longest = _lengths.get(id(files), REQUEST_BYTES)
        end, began = min(stop, start + longest), time.monotonic()
        try:
            piece = _within(network.stall_seconds, files, "cat_file", path, start=start, end=end)
            if time.monotonic() - began < network.stall_seconds / 4:  # so more may be asked for
                _lengths[id(files)] = min(REQUEST_BYTES, 2 * longest)
            # no version can be requested: if it is still the listed one, so are the bytes just read
            files.invalidate_cache()
            current = version(_within(network.stall_seconds, files, "info", path))
        except TimeoutError:
            if origin.tag is not None:  # or several requests could be of several versions
                _lengths[id(files)] = max(LEAST_REQUEST_BYTES, longest // 4)
            raise TransientError(f"{name}: timed out") from None
        except NetError as error:
            raise NetError(f"{name}: {error}") from None
        except (FileNotFoundError, PermissionError) as error:
            raise NetError(f"{name}: {_text(error)}, expected a readable file") from None
        except Exception as error:
            raise TransientError(f"{name}: {_text(error)}") from None
        if current != (origin.size, origin.tag):
            expected = brief(str((origin.size, origin.tag)))
            raise NetError(
                f"{name}: version {brief(str(current))}, expected {expected} as listed; run again "
                "to read it anew"
            )
        if len(piece) != end - start:
            raise TransientError(f"{name}: received {len(piece)} bytes, expected {end - start}")
        start = end
        yield piece


# ---- Calls of a library ----


def _patience(network: NetSettings) -> float:
    """Return the seconds that a page of a listing by fsspec may take: the library retries."""
    return network.attempts * network.stall_seconds


def _ask(
    files: "AbstractFileSystem", network: NetSettings, method: str, *of: Any, **how: Any
) -> Any:
    return _within(_patience(network), files, method, *of, **how)


def _within(seconds: float, files: "AbstractFileSystem", method: str, *of: Any, **how: Any) -> Any:
    """Return the result of a method of fsspec's file system; TimeoutError if it takes longer."""
    if files.async_impl:
        from fsspec import asyn

        coroutine = getattr(files, f"_{method}")
        return asyn.sync(files.loop, coroutine, *of, timeout=seconds, **how)
    result: Future = Future()

    def work() -> None:
        try:
            result.set_result(getattr(files, method)(*of, **how))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # which nothing can end
    return result.result(timeout=seconds)


def _text(error: Exception) -> str:
    """Return what a library of fsspec says, without what may be a signature of S3."""
    return re.sub(r"(?i)\b[0-9a-f]{64}\b", HIDDEN, message(error))


# ---- Requests of s3fs ----


@lru_cache(maxsize=1)
def _limited_session() -> type:
    """Return the connections of aiobotocore, with answers limited in bytes.

    s3fs reads each answer into memory, however long. So a listing and an error are read here, up to
    LISTING_BYTES. A range of a file is handed on, if it says that it is no longer than what was
    asked for; aiohttp reads no more of it than it says.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    class LimitedSession(AIOHTTPSession):
        """Connections as aiobotocore's setting `http_session_cls` takes them."""

        async def send(self, request: Any) -> Any:
            """Send a request of fsspec's, and return the answer."""
            _keep_secrets(request.headers)
            is_file, request.stream_output = request.stream_output, True  # nothing is read yet
            answer = await super().send(request)
            if is_file and answer.status_code < 300:
                _check_length(request.headers["Range"], answer.headers)
            else:
                answer._content = await _content(answer.raw)
            return answer

    return LimitedSession


async def _content(raw: Any) -> bytes:
    """Return the body of an answer to fsspec's session."""
    content = bytearray()
    while piece := await raw.content.read(S3_PIECE_BYTES):
        content += piece
        if len(content) > limits.LISTING_BYTES:
            raw.close()
            raise NetError(f"a listing of over {limits.LISTING_BYTES} bytes, expected less")
    return bytes(content)


def _check_length(range_header: str | bytes, headers: Mapping[str, str]) -> None:
    """Check that an answer to fsspec is no longer than the requested range."""
    range_header = range_header.decode() if isinstance(range_header, bytes) else range_header
    first, last = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", range_header).groups()
    expected = int(last) - int(first) + 1
    length = re.fullmatch("[0-9]{1,18}", headers.get("content-length", ""))
    if length is None or "transfer-encoding" in headers:
        raise NetError(f"sends no length, expected a range of {expected} bytes")
    if int(length[0]) > expected:
        raise NetError(f"sends {length[0]} bytes, expected a range of {expected}")


def _keep_secrets(headers: Any) -> None:
    """Hide from now on what a request of fsspec shows of credentials, which a store may repeat."""
    for name, value in headers.items():
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        if name.lower() == "x-amz-security-token":
            keep_secret(text)
        elif name.lower() == "authorization" and (key := re.search("Credential=([^/,]+)", text)):
            keep_secret(key[1])
