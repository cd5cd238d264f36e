"""The Hugging Face hub: a model fetched by its revision, an export pushed as one commit.

$HF_ENDPOINT says which hub, and $HF_TOKEN (or a login of the client's) who asks.
"""

import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.net import hub_files, redact
from pipeline.weights import hf

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
    name = f"model.LLM.checkpoint.Hub: {repo_id}"
    if revision is not None:
        name += f" at {revision}"
    expected = "a folder or a model on the hub"
    folder = hub_files.download(name, repo_id, revision, cache, MODEL, expected)
    if revision != folder.name:
        log.warning(f"convert: warning: {hub_files.pin_advice(name, folder.name, 'revision')}")
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

    hub_files.quiet()
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
        reason = redact.message(error, get_token())
        raise LockstepError(
            f"{repo_id}: {reason}, expected a repository on the hub that HF_TOKEN may write to"
        ) from None
    return commit.oid


def _is_of_a_model(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in MODEL)
