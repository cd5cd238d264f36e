"""Files of a repository on the Hugging Face hub, downloaded by revision and verified.

$HF_ENDPOINT names the hub, $HF_TOKEN (or a login of the client's) the user; with $HF_HUB_OFFLINE,
only files downloaded before are used.
"""

import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.errors import LockstepError, keep_secret
from pipeline.net import checksum, redact
from pipeline.stage.given_files import check_inside


def download(
    name: str,
    repo_id: str,
    revision: str | None,
    cache: Path,
    patterns: Sequence[str],
    expected: str,
) -> Path:
    """Download some of a repository's files into `cache`, those that are not there yet.

    Args:
      name: the repository, for errors.
      repo_id: owner/name, of a model.
      revision: a commit, a branch or a tag; None is the main branch.
      cache: a folder in the form of the hub's client.
      patterns: shell patterns of the files.
      expected: ends the error message.

    Returns:
      The folder of the files, named after the commit; it does not exist if no file matches.

    Raises:
      LockstepError: the repository or revision cannot be read, or a file arrived damaged.
    """
    from huggingface_hub import get_token, snapshot_download

    quiet()
    keep_secret(get_token())
    try:
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, cache_dir=cache, allow_patterns=list(patterns)
            )
        )
    except Exception as error:  # the client's, the network's and the file system's: dozens of kinds
        # without the library's error as its cause: that may hold what is hidden here
        raise LockstepError(f"{name}: {redact.message(error)}, expected {expected}") from None
    for file in sorted(folder.glob("*")):
        if any(fnmatch(file.name, pattern) for pattern in patterns):
            check_inside(file, folder)
            _verify(name, file)
    return folder


def pin_advice(name: str, commit: str, key: str) -> str:
    """Return the warning for a revision that is not a commit, and so may move."""
    return f"{name} is commit {commit} today; set {key} to that, so that the run stays the same"


def quiet() -> None:
    """Silence the client.

    It warns of each retry with the address, which is signed for uploads, and draws progress bars
    into logs.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as client

    client.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()


def _verify(name: str, file: Path) -> None:
    """Compare a file with the hub's hash, which the client does not do.

    The cache names a blob after it: the SHA-256 of a large file, the SHA-1 that git gives others.
    """
    blob = file.resolve()
    expected = blob.name
    if not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", expected):
        return  # a file system without symbolic links, or another server's kind of tag
    found = checksum.of_file(blob, "sha256" if len(expected) == 64 else "git-sha1")
    if found != expected:
        blob.unlink()
        file.unlink()
        raise LockstepError(
            f"{name}: {file.name} has hash {found}, expected {expected}; "
            "the damaged copy is removed: run again"
        )
