"""`data_location.Hub`: token files of a dataset on the Hugging Face hub, at one commit.

$HF_ENDPOINT names the hub, and $HF_TOKEN (or a login of the hub's client) the user.
"""

import logging
from fnmatch import fnmatch
from typing import Annotated
from urllib.parse import quote

from pydantic import BaseModel, Field, RootModel

from pipeline.net import addresses, hub_files, web
from pipeline.net.connection import Request
from pipeline.net.remote import Origin
from pipeline.runfile import Network
from pipeline.runfile.data import DataHub
from pipeline.runfile.explain import validate
from pipeline.runfile.serde_enum import variant_name
from pipeline.sources.listing import Listing, LocationFile, check_name, tokenizer_files

log = logging.getLogger(__name__)


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
    """A page of a listing."""


def listing(location: DataHub, network: Network) -> Listing:
    """Return the token files that the patterns name, by name.

    Raises:
      LockstepError: the dataset or revision does not exist, or may not be read.
    """
    where = f"{variant_name(location)}: {location.repo_id}"
    commit, files = list_dataset(location.repo_id, location.revision, where, network)
    if location.revision != commit:
        log.warning(f"download: warning: {hub_files.pin_advice(where, commit, 'revision')}")
    patterns = location.patterns
    return Listing(
        read=f"{location.repo_id} on the hub",
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=tuple(file for file in files if any(fnmatch(file.name, p) for p in patterns)),
        tokenizer=tokenizer_files(files),
        says={"repo_id": location.repo_id, "commit": commit},
    )


def list_dataset(
    repo_id: str, revision: str | None, where: str, network: Network
) -> tuple[str, tuple[LocationFile, ...]]:
    """Return a dataset's commit and its files at that commit, by name.

    The hub is asked directly: its client sets no time limit and gives up at the first 503.
    """
    from huggingface_hub import constants

    base = f"{constants.ENDPOINT}/api/datasets/{repo_id}"
    headers = addresses.hub_headers()

    def request(path: str) -> Request:
        return Request(f"{base}/{path}", headers, where)

    named = request(f"revision/{quote(revision or 'main', safe='')}")
    revised, _ = web.Pages(network).get(named)
    commit = validate(HubRevision, revised, f"{where}: invalid listing").sha
    entries: list[TreeEntry] = []
    pages = web.Pages(network)
    page: Request | None = request(f"tree/{commit}?recursive=true&expand=false")
    while page is not None:
        document, page = pages.get(page)
        entries += validate(TreePage, document, f"{where}: invalid listing").root
    files = [
        LocationFile(name=check_name(entry.path, where), origin=_origin(repo_id, commit, entry))
        for entry in entries
        if entry.type == "file"
    ]
    return commit, tuple(sorted(files, key=lambda file: file.name))


def _origin(repo_id: str, commit: str, entry: TreeEntry) -> Origin:
    # a large file's own hash; git's hash of any other
    checksum = f"sha256:{entry.lfs.oid}" if entry.lfs else f"git-sha1:{entry.oid}"
    url = f"hf://datasets/{repo_id}@{commit}/{quote(entry.path)}"
    return Origin(url=url, size=entry.size, checksum=checksum)
