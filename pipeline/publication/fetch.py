"""A publication, brought into a folder of its own: from a folder, a web server or the hub.

Nothing is trusted: names, sizes and hashes are checked before a file is read; imports no JAX.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from pipeline.errors import LockstepError
from pipeline.net import addresses, hub_files, store, web
from pipeline.net.remote import Origin
from pipeline.net.store import Transfer
from pipeline.publication import layout
from pipeline.publication.layout import MANIFEST, Publication, PublishedFile
from pipeline.runfile import Network
from pipeline.runfile.explain import validate_json
from pipeline.stage.artifacts import link, sha256_file, writes
from pipeline.stage.given_files import check_regular
from pipeline.stage.progress import Progress, size

HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
FORM = "a folder, http(s)://..., or owner/name on the hub (owner/name@revision)"
NETWORK = Network()


def fetch(source: str, target: Path, cache: Path, max_gb: int) -> Publication:
    """Bring a publication's files into an empty folder, and check each against its hash.

    Args:
      source: A folder, an address of one on a web server, or owner/name of a hub's repository.
      target: The empty folder.
      cache: The store of downloads.
      max_gb: The most that all files may have together, 10^9 bytes.

    Raises:
      LockstepError: There is no publication, it is too large, or a file is missing, was added or
        has changed.
    """
    if "://" in source:
        publication = _from_web(source.rstrip("/"), target, cache, max_gb)
    elif Path(source).is_dir():
        publication = _from_folder(Path(source), target, max_gb)
    elif HUB.fullmatch(source):
        publication = _from_hub(source, target, cache, max_gb)
    else:
        raise LockstepError(f"{source}: no such folder, expected {FORM}")
    for name, file in publication.files.items():
        path = target / name
        found, expected = (path.stat().st_size, sha256_file(path)), (file.bytes, file.sha256)
        if found != expected:
            raise LockstepError(
                f"{name}: found {found[0]} bytes of sha256 {found[1][:12]}, expected "
                f"{expected[0]} of {expected[1][:12]} as {MANIFEST} says"
            )
    return publication


def _from_folder(folder: Path, target: Path, max_gb: int) -> Publication:
    check_regular(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise LockstepError(f"{path}: no such file, expected a publication of `lockstep publish`")
    if path.stat().st_size > layout.MOST_MANIFEST_BYTES:
        raise _too_long(path, path.stat().st_size)
    publication = validate_json(Publication, path.read_bytes(), str(path))
    files = (path for path in folder.rglob("*") if path.is_file())
    names = {file.relative_to(folder).as_posix() for file in files}
    _check(publication, str(path), names, max_gb)
    for name in publication.files:
        _place(folder / name, target / name)
    return publication


def _from_web(address: str, target: Path, cache: Path, max_gb: int) -> Publication:
    request = addresses.resolve_web(f"{address}/{MANIFEST}")
    request = request._replace(expected="a publication of `lockstep publish`")
    document, _ = web.Pages(NETWORK).get(request)
    publication = validate_json(Publication, json.dumps(document), request.name)
    _check(publication, request.name, None, max_gb)

    def origin(name: str, file: PublishedFile) -> Origin:
        checksum = f"sha256:{file.sha256}"
        return Origin(url=f"{address}/{quote(name)}", size=file.bytes, checksum=checksum)

    _download(publication, origin, target, cache, MANIFEST)
    return publication


def _from_hub(source: str, target: Path, cache: Path, max_gb: int) -> Publication:
    repo, revision = HUB.fullmatch(source).groups()
    listed = hub_files.list_repo(repo, revision, source, NETWORK, FORM, folders=True).files
    if MANIFEST not in listed:
        raise LockstepError(f"{source}: has no {MANIFEST}, expected a publication")
    found = listed[MANIFEST]
    if found.size > layout.MOST_MANIFEST_BYTES:
        raise _too_long(f"{source}: {MANIFEST}", found.size)
    with Progress("verify", total=found.size, unit="byte") as bar:
        (stored,) = store.fetch([Transfer(MANIFEST, found, found.size)], cache, NETWORK, bar)
    publication = validate_json(Publication, stored.path.read_bytes(), f"{source}: {MANIFEST}")
    _check(publication, source, set(listed), max_gb)

    def origin(name: str, file: PublishedFile) -> Origin:
        if listed[name].size != file.bytes:
            text = f"{source}: {name}: {listed[name].size} bytes, expected {file.bytes}"
            raise LockstepError(f"{text} as {MANIFEST} says")
        return listed[name]

    _download(publication, origin, target, cache, "the hub")
    return publication


def _check(publication: Publication, where: str, names: set[str] | None, max_gb: int) -> None:
    """Check names and sizes; `names` are those of the files that are there, where that is known."""
    layout.check(publication, where)
    if publication.size > max_gb * 1e9:
        raise LockstepError(
            f"{where}: {size(publication.size)}, expected at most {max_gb} GB; where a publication "
            "may be that large, say so with --max-gb"
        )
    if names is None:
        return
    for name in sorted(publication.files.keys() - names):
        raise LockstepError(f"{name}: no such file, expected it as {MANIFEST} says")
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    for name in sorted(names - publication.files.keys() - hidden - {MANIFEST}):
        raise LockstepError(f"{name}: a file that {MANIFEST} does not list, expected none")


def _download(
    publication: Publication,
    origin: Callable[[str, PublishedFile], Origin],
    target: Path,
    cache: Path,
    author: str,
) -> None:
    """Fetch all files that are not in the store yet, and place them in the folder."""
    transfers = [
        Transfer(name, origin(name, file), file.bytes, author)
        for name, file in publication.files.items()
    ]
    with Progress("verify", total=publication.size, unit="byte") as bar:
        fetched = store.fetch(transfers, cache, NETWORK, bar)
    for transfer, stored in zip(transfers, fetched, strict=True):
        _place(stored.path, target / transfer.name)


def _place(source: Path, target: Path) -> None:
    with writes(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        link(source, target)


def _too_long(where: object, count: int) -> LockstepError:
    return LockstepError(
        f"{where}: {size(count)}, expected at most {size(layout.MOST_MANIFEST_BYTES)}"
    )
