"""`data_location.Hub`: token files of a dataset on the Hugging Face hub, at one commit.

$HF_ENDPOINT says which hub, and $HF_TOKEN (or a login of the hub's client) who asks.
"""

import logging
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from pydantic import BaseModel, Field, RootModel

from pipeline.net import addresses, hub_files, web
from pipeline.net.remote import Origin
from pipeline.runfile.data import DataHub
from pipeline.runfile.network import Network
from pipeline.runfile.serde_enum import variant_name
from pipeline.sources import Fetched, Survey, Wanted, listed

log = logging.getLogger(__name__)


def survey(location: DataHub, wanted: Wanted) -> Survey:
    """What a run would read of the dataset."""
    return listed.survey(listing(location, wanted), wanted)


def fetch(location: DataHub, folder: Path, wanted: Wanted) -> Fetched:
    """Fetches the dataset's token files, and its tokenizer where it has one.

    Raises:
      LockstepError: as `listing` and `listed.fetch_listed`.
    """
    return listed.fetch_listed(listing(location, wanted), folder, wanted)


def listing(location: DataHub, wanted: Wanted) -> listed.Listing:
    """The token files that the patterns name, by name.

    Raises:
      LockstepError: there is no such dataset or revision, or it may not be read.
    """
    return listed.remembered(wanted, location, lambda: _ask(location, wanted.network))


def _ask(location: DataHub, network: Network) -> listed.Listing:
    where = f"{variant_name(location)}: {location.repo_id}"
    commit, files = list_dataset(location.repo_id, location.revision, where, network)
    if location.revision != commit:
        log.warning(f"download: warning: {hub_files.pin_advice(where, commit, 'revision')}")
    patterns = location.patterns
    return listed.Listing(
        read=f"{location.repo_id} on the hub",
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=tuple(file for file in files if any(fnmatch(file.name, p) for p in patterns)),
        tokenizer=listed.tokenizer_files(files),
        says={"repo_id": location.repo_id, "commit": commit},
    )


class Large(BaseModel):
    """What git keeps elsewhere: the SHA-256."""

    oid: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """What is used of the hub's description of a file or a folder."""

    type: str
    path: str
    size: Annotated[int, Field(ge=0)] = 0
    oid: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    lfs: Large | None = None


class Commit(BaseModel):
    """What is used of the hub's description of a revision."""

    sha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


class Entries(RootModel[list[Entry]]):
    """A page of a listing."""


def list_dataset(
    repo_id: str, revision: str | None, where: str, network: Network
) -> tuple[str, tuple[listed.Listed, ...]]:
    """A dataset's commit and its files at that, by name.

    The hub is asked directly: its client sets no time limit and gives up at the first 503.

    Args:
      repo_id: owner/name.
      revision: a commit, a branch or a tag; None is the main branch.
      where: what errors call it.
      network: how patiently the hub is asked.

    Raises:
      LockstepError: there is no such dataset or revision, or it may not be read.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    base = f"{constants.ENDPOINT}/api/datasets/{repo_id}"
    headers = build_hf_headers(library_name="lockstep")

    def request(path: str) -> web.Request:
        return web.Request(f"{base}/{path}", headers, where)

    asked = request(f"revision/{quote(revision or 'main', safe='')}")
    commit = listed.read_answer(Commit, web.get_json(asked, network), where).sha
    entries: list[Entry] = []
    page: web.Request | None = request(f"tree/{commit}?recursive=true&expand=false")
    while page is not None:
        document, page = web.get_page(page, network)
        entries += listed.read_answer(Entries, document, where).root
    files = [
        listed.Listed(
            name=listed.check_name(entry.path, where), origin=_origin(repo_id, commit, entry)
        )
        for entry in entries
        if entry.type == "file"
    ]
    return commit, tuple(sorted(files, key=lambda file: file.name))


def _origin(repo_id: str, commit: str, entry: Entry) -> Origin:
    # a large file's own hash; of another the one that git gives it
    checksum = f"sha256:{entry.lfs.oid}" if entry.lfs else f"git-sha1:{entry.oid}"
    url = addresses.hub_file(repo_id, commit, entry.path)
    return Origin(url=url, size=entry.size, checksum=checksum)
