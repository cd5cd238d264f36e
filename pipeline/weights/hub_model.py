"""The Hugging Face hub: a model fetched by its revision, an export pushed as one commit.

$HF_ENDPOINT is the hub's address; the token is $HF_TOKEN, or from a login of the client.
"""

import logging
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from lockstep.errors import LockstepError, keep_secret
from lockstep.machine.progress import Progress
from pipeline.net import errors
from pipeline.net.transfers import hub_files
from pipeline.runfile import Network
from pipeline.weights import hf

log = logging.getLogger(__name__)

PROOF_PREFIX, SIGNATURE = "proof/", "model.sig"  # a publication's, beside its model
# The files of a model as a push writes them, which removes those of an earlier one.
PUSHED = (hf.CONFIG, hf.INDEX, "model*.safetensors", *hf.COMPANIONS)


def download(repo_id: str, revision: str | None, store: Path, network: Network) -> Path:
    """Fetch a model into the store, except for files that are there already.

    Without a revision it is the main branch. Return the model's folder, named after its commit.
    """
    name = f"model.LLM.checkpoint.Hub: {repo_id}"
    if revision is not None:
        name += f" at {revision}"
    expected = "a folder or a model on the hub"
    progress = partial(Progress, "convert")
    folder, repository = hub_files.download(
        name, repo_id, revision, store, hf.SMALL, expected, network, progress
    )
    weights = [hf.WEIGHTS]
    if hf.WEIGHTS not in repository.files and hf.INDEX in repository.files:
        weights = hf.named_shards(folder / hf.INDEX, repository.files, name)
    hub_files.fetch(name, repo_id, repository, store, weights, network, progress)
    if revision != folder.name:
        log.warning(f"convert: warning: {hub_files.pin_advice(name, folder.name, 'revision')}")
    return folder


def push(
    files: Mapping[str, Path], repo_id: str, message: str, *, private: bool, branch: str = "main"
) -> str:
    """Upload files to the hub, as one commit on a branch, and return the commit's hash.

    The repository and the branch are created if needed.

    The same commit deletes files of an earlier push that this one does not have: weights in other
    shards would be read in place of these, and a proof would be of other weights. `private`
    concerns a new repository only.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    hub_files.quiet()
    keep_secret(get_token())
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if branch != "main":
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        info = api.model_info(repo_id, revision=branch)
        old = [sibling.rfilename for sibling in info.siblings or ()]
        deleted = [name for name in old if name not in files and _is_pushed(name)]
        adds = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            for name, path in files.items()
        ]
        deletes = [CommitOperationDelete(path_in_repo=name) for name in deleted]
        commit = api.create_commit(
            repo_id,
            [*adds, *deletes],
            commit_message=message,
            revision=branch,
            parent_commit=info.sha,
        )
    except Exception as error:  # dozens of kinds; not chained, since it may hold the token
        reason = errors.message(error)
        raise LockstepError(
            f"{repo_id}: {reason}, expected a repository on the hub that HF_TOKEN may write to"
        ) from None
    return commit.oid


def _is_pushed(name: str) -> bool:
    """Return whether a file of a repository belongs to a model, or to a proof beside it."""
    if "/" in name:
        return name.startswith(PROOF_PREFIX)
    return name == SIGNATURE or any(fnmatch(name, pattern) for pattern in PUSHED)
