"""Which store an address means."""

from pathlib import Path

from lockstep.errors import LockstepError, brief, hide
from parts.volunteers.store.addresses import PublicEndpoint
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.store.s3 import S3Endpoint
from parts.volunteers.store.verbs import Store
from parts.volunteers.store.web_store import WebStore
from pipeline.net.limits import NetSettings

SCHEMES = {"http": PublicEndpoint, "https": PublicEndpoint, "s3": S3Endpoint}


def open_store(address: str, network: NetSettings | None = None) -> Store:
    """Return the store of a run's folder, by the address's scheme and the environment.

    Where the address is of a web server, anybody may read, and what puts and lists must be given.
    """
    scheme, _, path = address.rstrip("/").partition("://")
    if scheme == "file" and path.startswith("/"):
        return FolderStore(Path(path))
    if scheme in SCHEMES and path:
        endpoint = SCHEMES[scheme](address.rstrip("/"))
        return WebStore(hide(address.rstrip("/")), endpoint, network or NetSettings())
    raise LockstepError(
        f"{brief(address)}: found no store, expected file:///FOLDER, s3://BUCKET/FOLDER or "
        "https://SERVER/FOLDER"
    )
