"""The Hugging Face hub: a model fetched by its revision, an export pushed as one commit.

$HF_ENDPOINT says which hub, and $HF_TOKEN (or a login of the client's) who asks.
"""

import hashlib
import logging
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline import artifacts, hf, secrets
from pipeline.errors import LockstepError

log = logging.getLogger(__name__)

# What of a repository makes a model; nothing else is fetched, or removed by a push.
MODEL = (hf.CONFIG, hf.INDEX, "model*.safetensors", *hf.COMPANIONS)


def download(repo_id: str, revision: str | None, cache: Path) -> Path:
    """Fetches a model into `cache`, what is new of it.

    Args:
      repo_id: owner/name.
      revision: a commit, a branch or a tag; None is the main branch.
      cache: the client's own form of folder.

    Returns:
      The model's folder, named after its commit.

    Raises:
      LockstepError: there is no such model or revision, it cannot be read, or it came damaged.
    """
    from huggingface_hub import get_token, snapshot_download

    _quiet()
    name = f"model.LLM.checkpoint.Hub: {repo_id}"
    if revision is not None:
        name += f" at {revision}"
    try:
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, cache_dir=cache, allow_patterns=list(MODEL)
            )
        )
    except Exception as error:  # the client's, the network's and the file system's: dozens of kinds
        said = secrets.said(error, get_token())
        # the library's error may hold what is hidden here, so none is shown behind ours
        raise LockstepError(f"{name}: {said}, expected a folder or a model on the hub") from None
    for file in sorted(folder.iterdir()):
        _check_download(name, file)
    if revision != folder.name:
        log.warning(
            f"convert: warning: {name} is commit {folder.name} today; "
            "set revision to that, so that the run stays the same"
        )
    return folder


def push(files: Sequence[Path], repo_id: str, message: str, *, private: bool) -> str:
    """Uploads files as one commit, and makes the repository where there is none.

    What an earlier push left of a model and this one does not have goes in the same commit: weights
    in other shards would be read in place of these.

    Args:
      files: of one folder.
      repo_id: owner/name.
      message: the commit's.
      private: whether a new repository is; one that is there stays as it is.

    Returns:
      The commit, 40 hexadecimal digits.

    Raises:
      LockstepError: the hub refused, cannot be reached, or somebody else pushed to it meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    _quiet()
    api = HfApi()
    names = {file.name for file in files}
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        before = api.model_info(repo_id)
        there = [entry.rfilename for entry in before.siblings or ()]
        gone = [name for name in there if name not in names and _is_of_a_model(name)]
        adds = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file) for file in files]
        deletes = [CommitOperationDelete(path_in_repo=name) for name in gone]
        commit = api.create_commit(
            repo_id, [*adds, *deletes], commit_message=message, parent_commit=before.sha
        )
    except Exception as error:  # as above
        said = secrets.said(error, get_token())
        raise LockstepError(
            f"{repo_id}: {said}, expected a repository on the hub that HF_TOKEN may write to"
        ) from None
    return commit.oid


def _is_of_a_model(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in MODEL)


def _quiet() -> None:
    """Keeps the client from what is no good in a log.

    It warns of each retry with the address, which is signed where it uploads, and draws its bars
    where nobody looks.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as client

    client.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()


def _check_download(name: str, file: Path) -> None:
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
