"""Files of a repository on the Hugging Face hub, fetched by its revision, and checked.

$HF_ENDPOINT says which hub, $HF_TOKEN (or a login of the client's) who asks, and $HF_HUB_OFFLINE
that only what was fetched before is there.
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.net import redact as secrets
from pipeline.stage import artifacts


def download(
    name: str,
    repo_id: str,
    revision: str | None,
    cache: Path,
    patterns: Sequence[str],
    expected: str,
) -> Path:
    """Fetches some of a repository's files into `cache`, what is new of them.

    Args:
      name: what errors call it.
      repo_id: owner/name, of a model.
      revision: a commit, a branch or a tag; None is the main branch.
      cache: the client's own form of folder.
      patterns: shell patterns of what is fetched; nothing else is.
      expected: ends the error where it is not there.

    Returns:
      The folder of the files, named after the commit; it is not there where no file matches.

    Raises:
      LockstepError: there is no such repository or revision, it cannot be read, or it came damaged.
    """
    from huggingface_hub import get_token, snapshot_download

    quiet()
    try:
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, cache_dir=cache, allow_patterns=list(patterns)
            )
        )
    except Exception as error:  # the client's, the network's and the file system's: dozens of kinds
        said = secrets.said(error, get_token())
        # the library's error may hold what is hidden here, so none is shown behind ours
        raise LockstepError(f"{name}: {said}, expected {expected}") from None
    for file in sorted(folder.glob("*")):
        if any(fnmatch(file.name, pattern) for pattern in patterns):
            _check(name, file)
    return folder


def moves(name: str, commit: str, key: str) -> str:
    """What is to be said where the revision is none or another name than the commit's own."""
    return f"{name} is commit {commit} today; set {key} to that, so that the run stays the same"


def quiet() -> None:
    """Keeps the client from what is no good in a log.

    It warns of each retry with the address, which is signed where it uploads, and draws its bars
    where nobody looks.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as client

    client.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()


def _check(name: str, file: Path) -> None:
    """Compares a file with the hash that the hub gave, which its client does not do.

    The cache names a blob after it: the SHA-256 of a large file, the SHA-1 that git gives others.
    """
    blob = file.resolve()
    expected = blob.name
    if not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", expected):
        return  # a file system without symbolic links, or another server's kind of tag
    if len(expected) == 64:
        found = artifacts.sha256_file(blob)
    else:
        content = blob.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != expected:
        blob.unlink()
        file.unlink()
        raise LockstepError(
            f"{name}: {file.name} has hash {found}, expected {expected}; "
            "the damaged copy is removed: run again"
        )
