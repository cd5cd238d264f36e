"""Files of a repository on the Hugging Face hub, listed and downloaded by revision.

$HF_ENDPOINT names the hub, $HF_TOKEN (or a login of the hub's client) the user; with
$HF_HUB_OFFLINE, only files downloaded before are used, here or by the hub's own client. Where the
hub is out of reach, so is a commit that its client has downloaded. The hub is asked directly: its
client sets no limit of time, gives up at the first 503, and compares no hashes.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, Field, RootModel

from .. import remote, web
from ..errors import BadRequestError, NetError, check_name, is_path, message
from ..limits import Bar, NetSettings, UnreachableError
from ..origin import Origin, hash_file, validate
from ..web import Request, offline
from . import store

log = logging.getLogger(__name__)

DATASETS, USUAL = "datasets/", "https://huggingface.co"


class LfsPointer(BaseModel):
    """The SHA-256 of a file that git keeps elsewhere."""

    oid: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TreeEntry(BaseModel):
    """The hub's description of a file or a folder, as far as it is used."""

    type: str
    path: str
    size: Annotated[int, Field(ge=0)] = 0
    oid: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    lfs: LfsPointer | None = None


class HubRevision(BaseModel):
    """The hub's description of a revision, as far as it is used."""

    sha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


class TreePage(RootModel[list[TreeEntry]]):
    """A page of the listing of a repository on the hub."""


class Repository(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The files of a repository at one commit, by their names."""

    commit: str
    files: dict[str, Origin]


def list_repo(
    repo: str,
    revision: str | None,
    where: str,
    network: NetSettings,
    expected: str = "a dataset on the hub",
    *,
    folders: bool = False,
) -> Repository:
    """Return the files of a repository: datasets/owner/name, or a model's, owner/name.

    The revision is a commit, a branch or a tag; None is the main branch. `folders` says whether a
    model's folders are listed too. Errors call the repository `where`, and end with `expected`.
    """
    from huggingface_hub import constants

    is_dataset = repo.startswith(DATASETS)
    _check_name(repo.removeprefix(DATASETS), where, expected)
    base = f"{constants.ENDPOINT}/api/{'' if is_dataset else 'models/'}{repo}"
    headers, recursive = remote.hub_headers(), str(is_dataset or folders).lower()
    files: dict[str, Origin] = {}
    try:
        address = f"{base}/revision/{quote(revision or 'main', safe='')}"
        answer, _ = web.Pages(network).get(Request(address, headers, where, expected))
        commit = validate(HubRevision, answer, f"{where}: invalid listing").sha
        tree = f"{base}/tree/{commit}?recursive={recursive}&expand=false"
        page: Request | None = Request(tree, headers, where, expected)
        pages = web.Pages(network)
        while page is not None:
            document, page = pages.get(page)
            for entry in validate(TreePage, document, f"{where}: invalid listing").root:
                if entry.type == "file":
                    name = check_name(entry.path, where)  # before it is part of an address
                    # a large file's own hash; git's hash of any other
                    checksum = f"sha256:{entry.lfs.oid}" if entry.lfs else f"git-sha1:{entry.oid}"
                    url = f"hf://{repo}@{commit}/{quote(name)}"
                    files[name] = Origin(url=url, size=entry.size, checksum=checksum)
    except UnreachableError:
        is_commit = re.fullmatch("[0-9a-f]{40}", revision or "")
        cached = _in_cache(repo, revision, where) if offline() or is_commit else None
        if cached is None:
            raise
        return cached
    return Repository(commit=commit, files=files)


def _in_cache(repo: str, revision: str | None, where: str) -> Repository | None:
    """Return the files of a repository as the cache of the hub's client has them, if it has any.

    The client keeps a commit's listing where it has fetched all that a pattern names; without one,
    only the hub knows whether the commit has more files.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
    )

    arguments: dict[str, Any] = {"repo_id": repo.removeprefix(DATASETS), "revision": revision}
    arguments["repo_type"] = "dataset" if repo.startswith(DATASETS) else "model"
    try:
        folder = Path(snapshot_download(**arguments, local_files_only=True))
    except IncompleteSnapshotError as error:
        folder = Path(error.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    repository = os.path.realpath(folder.parents[1])  # whose blobs the snapshot's links lead to
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and Path(os.path.realpath(path)).is_relative_to(repository)
    }
    sizes = {check_name(name, where): path.stat().st_size for name, path in paths.items()}
    note = "whether the commit has more files the hub alone knows"
    try:
        tree = get_cached_repo_tree(**arguments | {"revision": folder.name})
        sizes, note = {check_name(file.path, where): file.size for file in tree}, "all are listed"
    except CachedRepoTreeNotFoundError:
        pass
    log.warning(f"{where}: the hub is not asked, its files are those of {folder}; {note}")
    files = {
        name: Origin(
            url=f"hf://{repo}@{folder.name}/{quote(name)}",
            size=size,
            checksum=_checksum(paths[name]) if name in paths else None,
        )
        for name, size in sizes.items()
    }
    return Repository(commit=folder.name, files=files)


def _checksum(path: Path) -> str:
    """Return the checksum of a file in the cache: that of the blob's name, else its own SHA-256."""
    name = Path(os.path.realpath(path)).name
    if re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", name):
        return f"{'sha256' if len(name) == 64 else 'git-sha1'}:{name}"
    return f"sha256:{hash_file(path)}"


def _check_name(repo_id: str, where: str, expected: str) -> None:
    """Refuse what can be no name on the hub, before the hub is asked for it."""
    from huggingface_hub.utils import validate_repo_id

    if is_path(repo_id):
        raise BadRequestError(f"{where}: no such folder, expected {expected}")
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise NetError(f"{where}: {message(error)}, expected {expected}") from None


def download(
    name: str,
    repo_id: str,
    revision: str | None,
    cache: Path,
    patterns: Sequence[str],
    expected: str,
    network: NetSettings,
    progress: Callable[..., AbstractContextManager[Bar]],
) -> tuple[Path, Repository]:
    """Download some of a model's files, those that are not in the store yet.

    `patterns` are shell patterns of the files, and `cache` is the folder of the store. The revision
    is as in `list_repo`; offline, the repository is what it was the last time. Errors call it
    `name`, and end with `expected`.

    Returns:
      The folder of the files, named after the commit, which does not exist if no file matches; and
      the whole repository.
    """
    _check_name(repo_id, name, expected)
    repository = store.remembered(
        cache,
        Repository,
        f"{repo_id}@{revision}",
        name,
        lambda: list_repo(repo_id, revision, name, network, expected),
    )
    folder = fetch(name, repo_id, repository, cache, patterns, network, progress)
    return folder, repository


def fetch(
    name: str,
    repo_id: str,
    repository: Repository,
    cache: Path,
    patterns: Sequence[str],
    network: NetSettings,
    progress: Callable[..., AbstractContextManager[Bar]],
) -> Path:
    """Download some of the files of a repository that is listed, as `download` does."""
    files = {
        file: origin
        for file, origin in sorted(repository.files.items())
        if "/" not in file and any(fnmatch(file, pattern) for pattern in patterns)
    }
    transfers = [
        store.Transfer(f"{name}: {file}", origin, origin.size) for file, origin in files.items()
    ]
    with progress(total=sum(origin.size for origin in files.values()), unit="byte") as bar:
        fetched = store.fetch(transfers, cache, network, bar)
    folder = cache / "hub" / repo_id.replace("/", "--") / repository.commit
    if files:
        store.link_files(dict(zip(files, fetched, strict=True)), folder)
    return folder


def package_url(repo_id: str, commit: str) -> str:
    """Return a model at a commit as a package URL, which names a hub that is not the usual one."""
    from huggingface_hub import constants

    hub = constants.ENDPOINT.rstrip("/")
    qualifier = "" if hub == USUAL else f"?repository_url={quote(hub, safe='')}"
    return f"pkg:huggingface/{repo_id}@{commit}{qualifier}"


def pin_advice(name: str, commit: str, key: str) -> str:
    """Return the warning for a revision that is not a commit, and so may move."""
    return f"{name} is commit {commit} today; set {key} to that, so that the run stays the same"


def quiet() -> None:
    """Silence the hub's client.

    It warns of each retry with the address, which is signed for uploads, and draws progress bars
    into logs.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as client

    client.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
