"""`data_location.Hub`: token files of a dataset on the Hugging Face hub, at one commit.

$HF_ENDPOINT names the hub, and $HF_TOKEN (or a login of the hub's client) the user.
"""

import logging
import re
from fnmatch import fnmatch

from lockstep.tables.variant import variant_name
from pipeline.net.transfers import hub_files
from pipeline.runfile import Network
from pipeline.runfile.data import DataHub
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import Listing, LocationFile, held_by

log = logging.getLogger(__name__)

REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def listing(location: DataHub, network: Network) -> Listing:
    """Return the token files that the patterns name, by name.

    Raises:
      LockstepError: the dataset or revision does not exist, or may not be read.
    """
    where = f"{variant_name(location)}: {location.repo_id}"
    commit, files = list_dataset(location.repo_id, location.revision, where, network)
    if location.revision != commit:
        log.warning(f"download: warning: {hub_files.pin_advice(where, commit, 'revision')}")
    named = [file for file in files if any(fnmatch(file.name, p) for p in location.patterns)]
    return Listing(
        read=f"{location.repo_id} on the hub",
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        **held_by(files) | {"files": tuple(named)},
        says={"repo_id": location.repo_id, "commit": commit},
    )


def list_dataset(
    repo_id: str, revision: str | None, where: str, network: Network
) -> tuple[str, tuple[LocationFile, ...]]:
    """Return a dataset's commit and its files at that commit, by name."""
    listed = hub_files.list_repo(f"datasets/{repo_id}", revision, where, network)
    files = [LocationFile(name=name, origin=origin) for name, origin in listed.files.items()]
    return listed.commit, tuple(sorted(files, key=lambda file: file.name))


PROVIDER = provider(listing)
