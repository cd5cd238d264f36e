"""A publication, found and brought here: from a folder, a web server or the hub.

Nothing is trusted: names, sizes and hashes are checked before a file is read; imports no JAX.
Nothing is written before the publication's list is there and was checked.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from pipeline.errors import LockstepError, RequestError, hide
from pipeline.net import addresses, hub_files, store, web
from pipeline.net.remote import Origin
from pipeline.net.store import Transfer
from pipeline.publication import layout
from pipeline.publication.layout import MANIFEST, Publication, PublishedFile
from pipeline.runfile import Network
from pipeline.runfile.explain import validate_json
from pipeline.stage.artifacts import link, sha256_file, writes
from pipeline.stage.given_files import check_regular, expand, unchanged, walk
from pipeline.stage.progress import Progress, size

HUB = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
FORM = "a folder, http(s)://..., or owner/name on the hub (owner/name@revision)"


class Limits(NamedTuple):
    """What a publication may take.

    Attributes:
      max_gb: The most that all files may have together, 10^9 bytes.
      network: Limits of time and attempts.
    """

    max_gb: int
    network: Network


class Found(NamedTuple):
    """A publication whose list is here and was checked.

    Attributes:
      publication: Its list of files.
      bring: Brings the files that the list has, but for some that nobody needs now, each checked
        against its hash, and returns their folder. It is given an empty folder, which stays empty
        where they are here already, and the names of those to leave.
    """

    publication: Publication
    bring: Callable[[Path, set[str]], Path]


def find(source: str, cache: Path, limits: Limits) -> Found:
    """Find a publication, which `FORM` says how to name, and check its list of files.

    Raises:
      LockstepError: There is no publication, it is too large, or a file is missing or was added.
        `Found.bring` raises it where a file has changed.
    """
    if "://" in source:
        return _on_web(source, cache, limits)
    if (folder := expand(source, "SOURCE")).is_dir():
        return _in_folder(folder, limits)
    if HUB.fullmatch(source):
        return _on_hub(source, cache, limits)
    raise RequestError(f"{source}: no such folder, expected {FORM}")


def _in_folder(folder: Path, limits: Limits) -> Found:
    """A publication in a folder is read where it is."""
    check_regular(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise RequestError(f"{path}: no such file, expected a publication of `lockstep publish`")
    if path.stat().st_size > layout.MOST_MANIFEST_BYTES:
        raise _too_long(path, path.stat().st_size)
    publication = validate_json(Publication, path.read_bytes(), str(path))
    _check(publication, str(path), {name for name, _ in walk(folder)}, limits)

    def bring(_: Path, skip: set[str]) -> Path:
        del skip  # they are here
        for name, file in publication.files.items():  # a larger file would take long to hash
            _compare(name, (folder / name).stat().st_size, file.bytes, "bytes")
        with unchanged(folder / name for name in publication.files):
            for name, file in publication.files.items():
                _compare(name, sha256_file(folder / name), file.sha256, "as SHA-256")
        return folder

    return Found(publication, bring)


def _on_web(address: str, cache: Path, limits: Limits) -> Found:
    request = addresses.resolve_web(_below(address, MANIFEST))
    request = request._replace(expected="a publication of `lockstep publish`")
    _say_what_is_asked(request.name, limits.network)
    pages = web.Pages(limits.network, layout.MOST_MANIFEST_BYTES)
    document, _ = pages.get(request)
    publication = validate_json(Publication, json.dumps(document), request.name)
    _check(publication, request.name, None, limits)

    def origin(name: str, file: PublishedFile) -> Origin:
        checksum = f"sha256:{file.sha256}"
        return Origin(url=_below(address, name), size=file.bytes, checksum=checksum)

    return _to_download(publication, origin, cache, limits, MANIFEST)


def _below(address: str, name: str) -> str:
    """Return the address of a file in a folder on a web server; a query stays behind the path."""
    path, mark, query = address.partition("#")[0].partition("?")
    return f"{path.rstrip('/')}/{quote(name)}{mark}{query}"


def _on_hub(source: str, cache: Path, limits: Limits) -> Found:
    repo, revision = HUB.fullmatch(source).groups()
    _say_what_is_asked(f"the hub for {source}", limits.network)
    listed = hub_files.list_repo(repo, revision, source, limits.network, FORM, folders=True).files
    if MANIFEST not in listed:
        raise RequestError(f"{source}: has no {MANIFEST}, expected a publication")
    found = listed[MANIFEST]
    if found.size > layout.MOST_MANIFEST_BYTES:
        raise _too_long(f"{source}: {MANIFEST}", found.size)
    with Progress("verify", total=found.size, unit="byte") as bar:
        transfer = Transfer(MANIFEST, found, found.size, "the hub")
        (stored,) = store.fetch([transfer], cache, limits.network, bar)
    publication = validate_json(Publication, stored.path.read_bytes(), f"{source}: {MANIFEST}")
    _check(publication, source, set(listed), limits)

    def origin(name: str, file: PublishedFile) -> Origin:
        _compare(f"{source}: {name}", listed[name].size, file.bytes, "bytes")
        return listed[name]

    return _to_download(publication, origin, cache, limits, "the hub")


def _say_what_is_asked(name: str, network: Network) -> None:
    """Print from where the first answer is awaited, and for how long at most.

    Each attempt that fails has a line of its own.
    """
    times = f"{network.attempts} time{'' if network.attempts == 1 else 's'}"
    print(f"verify: asks {hide(name)}, at most {times} for {network.stall_seconds:g} s")


def _check(publication: Publication, where: str, names: set[str] | None, limits: Limits) -> None:
    """Check names and sizes; `names` are those of the files that are there, where that is known."""
    layout.check(publication, where)
    if publication.size > limits.max_gb * 1e9:
        raise RequestError(
            f"{where}: {size(publication.size)}, expected at most {limits.max_gb} GB; where a "
            "publication may be that large, say so with --max-gb"
        )
    if names is None:
        return
    for name in sorted(publication.files.keys() - names):
        raise LockstepError(f"{name}: no such file, expected it as {MANIFEST} says")
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    for name in sorted(names - publication.files.keys() - hidden - {MANIFEST}):
        raise LockstepError(f"{name}: a file that {MANIFEST} does not list, expected none")


def _compare(name: str, found: int | str, expected: int | str, unit: str) -> None:
    """Compare the size of a file, or its hash, with what the list says."""
    if found != expected:
        here, listed = (v[:12] if isinstance(v, str) else v for v in (found, expected))
        raise LockstepError(f"{name}: found {here} {unit}, expected {listed} as {MANIFEST} says")


def _to_download(
    publication: Publication,
    origin: Callable[[str, PublishedFile], Origin],
    cache: Path,
    limits: Limits,
    author: str,
) -> Found:
    """A publication whose files are fetched unless they are in the store already."""
    every = [
        Transfer(name, origin(name, file), file.bytes, author)
        for name, file in publication.files.items()
    ]

    def bring(folder: Path, skip: set[str]) -> Path:
        transfers = [transfer for transfer in every if transfer.name not in skip]
        whole = sum(publication.files[transfer.name].bytes for transfer in transfers)
        with Progress("verify", total=whole, unit="byte") as bar:
            fetched = store.fetch(transfers, cache, limits.network, bar)
        for transfer, stored in zip(transfers, fetched, strict=True):
            _compare(
                transfer.name, stored.sha256, publication.files[transfer.name].sha256, "as SHA-256"
            )
            target = folder / transfer.name
            with writes(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                link(stored.path, target)
        return folder

    return Found(publication, bring)


def _too_long(where: object, count: int) -> LockstepError:
    return LockstepError(
        f"{where}: {size(count)}, expected at most {size(layout.MOST_MANIFEST_BYTES)}"
    )
