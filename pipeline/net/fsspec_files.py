"""Files at any address of fsspec, whose file systems find credentials and retry on their own."""

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.errors import LockstepError, hide, keep_secret
from pipeline.net import redact
from pipeline.net.retry import TransientError, UnnamedVersionError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

EXTRAS = {"s3": "s3", "s3a": "s3"}  # scheme -> the extra that installs its library
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # the libraries send them
REQUEST_BYTES = 2**24  # at most: what a broken connection can cost
# Where file systems put a file's version, in the order in which it is looked for.
TAGS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modificationTime", "created")


def find_file_system(url: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of an address, and its path there.

    Raises:
      LockstepError: the scheme is unknown, or its library is not installed.
    """
    files = file_system("/".join(url.split("/")[:3]))
    return files, files._strip_protocol(url)


@lru_cache(maxsize=8)
def file_system(url: str) -> "AbstractFileSystem":
    """Return the file system of a bucket or a host: making one takes longer than a request."""
    import fsspec

    keep_secret(*map(os.environ.get, SECRETS))
    try:
        # not the instance that fsspec shares with every user of this process
        return fsspec.core.url_to_fs(url, skip_instance_cache=True)[0]
    except ImportError as error:
        extra = EXTRAS.get(url.partition("://")[0])
        install = f"pip install -c constraints.txt -e '.[{extra}]'" if extra else str(error)
        raise LockstepError(f"{hide(url)}: library not installed, expected it: {install}") from None
    except Exception as error:  # an unknown scheme, invalid credentials
        raise LockstepError(
            f"{hide(url)}: {redact.message(error)}, expected an address of fsspec"
        ) from None


def list_files(url: str) -> dict[str, dict[str, Any]]:
    """Return the files at and below an address: path -> fsspec's description.

    Raises:
      LockstepError: the address does not exist or cannot be read.
    """
    files, path = find_file_system(url)
    try:
        files.invalidate_cache()
        paths = files.find(path, detail=True)
    except Exception as error:
        raise LockstepError(
            f"{hide(url)}: {redact.message(error)}, expected a readable folder or file"
        ) from None
    return {name: info for name, info in paths.items() if info["type"] == "file"}


def version(info: dict) -> tuple[int, str | None]:
    """Return the size and the version in fsspec's description of a file."""
    tag = next((info[key] for key in TAGS if info.get(key)), None)
    return info["size"], None if tag is None else str(tag)


def read(
    url: str, start: int, stop: int, expected: tuple[int, str | None], is_rest: bool
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `stop` of one version of a file.

    `is_rest` says whether they complete what was read before.

    Raises:
      TransientError: whatever goes wrong in the library.
      UnnamedVersionError: the file system names no version, and more than one request is needed.
      LockstepError: the file cannot be read, or is another version.
    """
    name, (files, path) = hide(url), find_file_system(url)
    if expected[1] is None and (is_rest or stop - start > REQUEST_BYTES):
        raise UnnamedVersionError(
            f"{name}: the file system does not say of which version a part of the file is, "
            f"expected one of {', '.join(TAGS)}"
        )
    try:
        while start < stop:
            end = min(stop, start + REQUEST_BYTES)
            piece = files.cat_file(path, start=start, end=end)
            # a version cannot be asked for: as listed, and so still, the bytes between are of it
            files.invalidate_cache()
            current = version(files.info(path))
            if current != expected:
                raise LockstepError(
                    f"{name}: version {current}, expected {expected} as listed; run again to read "
                    "it anew"
                )
            if len(piece) != end - start:
                raise TransientError(f"{name}: received {len(piece)} bytes, expected {end - start}")
            start = end
            yield piece
    except (FileNotFoundError, PermissionError) as error:
        raise LockstepError(f"{name}: {redact.message(error)}, expected a readable file") from None
    except (LockstepError, TransientError):
        raise
    except Exception as error:
        raise TransientError(f"{name}: {redact.message(error)}") from None
