"""A publication, found and brought here: from a folder, a web server or the hub.

Nothing is trusted: names, sizes and hashes are checked before a file is read; imports no JAX.
Nothing is written before the publication's list has been checked.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path, PurePath
from typing import NamedTuple
from urllib.parse import quote

from lockstep.errors import LockstepError, RequestError, hide
from lockstep.files import link, read_bytes, sha256_file, writes
from lockstep.machine.progress import Progress, size
from parts.publication import layout
from parts.publication.layout import MANIFEST, SIGNATURE, Publication, PublishedFile
from pipeline.net import remote, web
from pipeline.net.origin import Origin
from pipeline.net.transfers import hub_files, store
from pipeline.net.transfers.store import Transfer
from pipeline.runfile import Network
from pipeline.stage.untrusted_files import check_regular, expand, opened, unchanged, walk

HUB = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
# Of what is read into memory; a signature is of as many files, in more words and in base64.
MOST_BYTES = {MANIFEST: 2**20, SIGNATURE: 2**22}
FORM = "a folder, http(s)://..., or owner/name on the hub (owner/name@revision)"


class Limits(NamedTuple):
    """Limits on the size and time of fetching a publication."""

    max_gb: int  # the most that all files may have together, 10^9 bytes
    network: Network  # limits of time and attempts


class PublicListing(NamedTuple):
    """A publication to fetch whose list is here and was checked."""

    publication: Publication
    uri: str  # its place: an address without a query, or a package URL with the hub's commit
    sha256: str  # SHA-256 of the list
    # the content of its signature, or None; of a web server it is asked for only where the
    # reader has a key
    signature: bytes | None
    # brings the files that the list has, but for some that nobody needs now, each checked
    # against its hash, and yields their folder, in which they stay as they were hashed. It is
    # given an empty folder, which stays empty where they are here already, and the names of
    # those to leave.
    bring: Callable[[Path, set[str]], AbstractContextManager[Path]]
    commit: str | None = None  # the commit of a repository on the hub, or None

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of every file of the publication but the signature, with the list's."""
        listed = {name: file.sha256 for name, file in self.publication.files.items()}
        return listed | {MANIFEST: self.sha256}


def find(source: str, cache: Path, limits: Limits, *, signed: bool = False) -> PublicListing:
    """Find a publication to fetch, named as `FORM` says, and check its list of files.

    `signed` says whether a web server is asked for a signature.

    Raises:
      LockstepError: There is no publication, it is too large, or a file is missing or was added.
        `PublicListing.bring` raises it where a file has changed.
    """
    if "://" in source:
        return _on_web(source, cache, limits, signed)
    if is_folder(source):
        return _in_folder(expand(source, "SOURCE"), limits)
    if HUB.fullmatch(source):
        return _on_hub(source, cache, limits)
    raise RequestError(f"{source}: no such folder, expected {FORM}")


def is_folder(source: str) -> bool:
    """Return whether a publication is read where it is: nothing of it is fetched."""
    return "://" not in source and expand(source, "SOURCE").is_dir()


def _in_folder(folder: Path, limits: Limits) -> PublicListing:
    """Fetch nothing: return a publication in a folder, which is read where it is."""
    check_regular(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise RequestError(f"{path}: no such file, expected a publication of `lockstep publish`")
    content, names = read_bytes(path, MOST_BYTES[MANIFEST]), {name for name, _ in walk(folder)}
    publication = layout.parse(content, str(path))
    _check(publication, str(path), names, limits)
    signed = SIGNATURE in names
    signature = read_bytes(folder / SIGNATURE, MOST_BYTES[SIGNATURE]) if signed else None

    @contextmanager
    def bring(_: Path, skip: set[str]) -> Iterator[Path]:
        del skip  # they are here
        with opened(folder) as here, unchanged(_with_folders(here, publication.files)):
            for name, file in publication.files.items():  # a larger file would take long to hash
                _compare(name, (here / name).stat().st_size, file.bytes, "bytes")
            for name, file in publication.files.items():
                _compare(name, sha256_file(here / name), file.sha256, "as SHA-256")
            yield here

    uri = folder.resolve().as_uri()
    return PublicListing(publication, uri, sha256(content).hexdigest(), signature, bring)


def _on_web(address: str, cache: Path, limits: Limits, signed: bool) -> PublicListing:
    request = remote.resolve_web(_file_address(address, MANIFEST))
    request = request._replace(expected="a publication of `lockstep publish`")
    _say_what_is_asked(request.name, limits.network)
    pages = web.Pages(limits.network, MOST_BYTES[MANIFEST])
    content = pages.content(request)
    publication = layout.parse(content, request.name)
    _check(publication, request.name, None, limits)
    signature = None
    if signed:
        request = remote.resolve_web(_file_address(address, SIGNATURE))
        request = request._replace(expected="a signature of `lockstep publish --sign`")
        signature = web.Pages(limits.network, MOST_BYTES[SIGNATURE]).content(request)

    def origin(name: str, file: PublishedFile) -> Origin:
        checksum = f"sha256:{file.sha256}"
        return Origin(url=_file_address(address, name), size=file.bytes, checksum=checksum)

    bring = _download(publication, origin, cache, limits, MANIFEST)
    uri = hide(address.partition("#")[0].partition("?")[0])
    return PublicListing(publication, uri, sha256(content).hexdigest(), signature, bring)


def _file_address(address: str, name: str) -> str:
    """Return the address of a publication's file on a web server; a query stays behind the path."""
    path, mark, query = address.partition("#")[0].partition("?")
    return f"{path.rstrip('/')}/{quote(name)}{mark}{query}"


def _on_hub(source: str, cache: Path, limits: Limits) -> PublicListing:
    repo, revision = HUB.fullmatch(source).groups()
    _say_what_is_asked(f"the hub for {source}", limits.network)
    listing = hub_files.list_repo(repo, revision, source, limits.network, FORM, folders=True)
    files = listing.files
    if MANIFEST not in files:
        raise RequestError(f"{source}: has no {MANIFEST}, expected a publication")
    names = [name for name in (MANIFEST, SIGNATURE) if name in files]
    for name in names:
        if (count := files[name].size) > (most := MOST_BYTES[name]):
            raise LockstepError(f"{source}: {name}: {size(count)}, expected at most {size(most)}")
    transfers = [Transfer(name, files[name], files[name].size, "the hub") for name in names]
    with Progress("verify", total=sum(t.size for t in transfers), unit="byte") as bar:
        stored = store.fetch(transfers, cache, limits.network, bar)
    content, *signature = (item.path.read_bytes() for item in stored)
    publication = layout.parse(content, f"{source}: {MANIFEST}")
    _check(publication, source, set(files), limits)

    def origin(name: str, file: PublishedFile) -> Origin:
        _compare(f"{source}: {name}", files[name].size, file.bytes, "bytes")
        return files[name]

    bring = _download(publication, origin, cache, limits, "the hub")
    uri = hub_files.package_url(repo, listing.commit)
    return PublicListing(
        publication, uri, stored[0].sha256, *(signature or [None]), bring, listing.commit
    )


def _say_what_is_asked(name: str, network: Network) -> None:
    """Print which server is asked first, and for how long at most.

    Each failed attempt has a line of its own.
    """
    times = f"{network.attempts} time{'' if network.attempts == 1 else 's'}"
    print(f"verify: asks {hide(name)}, at most {times} for {network.stall_seconds:g} s")


def _check(publication: Publication, where: str, names: set[str] | None, limits: Limits) -> None:
    """Check names and sizes of a publication to fetch; `names` are its files', None if unknown."""
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
    for name in sorted(names - publication.files.keys() - hidden - {MANIFEST, SIGNATURE}):
        raise LockstepError(f"{name}: a file that {MANIFEST} does not list, expected none")


def _compare(name: str, actual: int | str, expected: int | str, unit: str) -> None:
    """Compare the size of a file to fetch, or its hash, with what the publication's list says."""
    if actual != expected:
        got, listed = (v[:12] if isinstance(v, str) else v for v in (actual, expected))
        raise LockstepError(f"{name}: found {got} {unit}, expected {listed} as {MANIFEST} says")


def _download(
    publication: Publication,
    origin: Callable[[str, PublishedFile], Origin],
    cache: Path,
    limits: Limits,
    author: str,
) -> Callable[[Path, set[str]], AbstractContextManager[Path]]:
    """Return what fetches a publication's files, unless they are stored; see `PublicListing`."""
    all_transfers = [
        Transfer(name, origin(name, file), file.bytes, author)
        for name, file in publication.files.items()
    ]

    @contextmanager
    def bring(folder: Path, skip: set[str]) -> Iterator[Path]:
        transfers = [transfer for transfer in all_transfers if transfer.name not in skip]
        total = sum(publication.files[transfer.name].bytes for transfer in transfers)
        with Progress("verify", total=total, unit="byte") as bar:
            fetched = store.fetch(transfers, cache, limits.network, bar)
        for transfer, stored in zip(transfers, fetched, strict=True):
            _compare(
                transfer.name, stored.sha256, publication.files[transfer.name].sha256, "as SHA-256"
            )
            target = folder / transfer.name
            with writes(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                link(stored.path, target)
        with unchanged(_with_folders(folder, (transfer.name for transfer in transfers))):
            yield folder

    return bring


def _with_folders(folder: Path, names: Iterable[str]) -> set[Path]:
    """Return the paths of a publication's files in a folder, and of folders up to them."""
    paths = {PurePath(name) for name in names}
    folders = {parent for path in paths for parent in path.parents} - {PurePath()}
    return {folder / path for path in paths | folders}
