"""The files of text that a run file names: on this disk, at an address, in a bucket, on the hub."""

import logging
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from lockstep.errors import LockstepError, brief, hide
from pipeline.net import remote
from pipeline.net.transfers import hub_files, store
from pipeline.runfile import Network
from pipeline.runfile.data import ShuffleDontShuffle, TextSource
from pipeline.sources.provider import FetchOptions
from pipeline.sources.text import subset
from pipeline.sources.text.documents import ENDINGS
from pipeline.sources.token_files.http import files_at, list_bucket
from pipeline.sources.token_files.hub import REPO_ID, list_dataset
from pipeline.sources.token_files.listing import Listing, LocationFile, check_local, local_file
from pipeline.sources.token_files.url import list_files
from pipeline.stage.given_files import expand, walk

log = logging.getLogger(__name__)

EVERYTHING = TextSource.model_fields["files"].default


def files_of(source: TextSource, where: str, options: FetchOptions) -> Listing:
    """Return the files of text, by name; offline, those of the last time.

    Args:
      source: where they are.
      where: its place in the run file, for errors.
      options: how the run wants its data.

    Raises:
      LockstepError: it cannot be read, or has no such files.
    """
    root = expand(source.source, where)
    if root.exists():
        _refuse_of_hub(source, where)
        listing = _local(source, root)
    else:
        listing = store.remembered(
            options.store,
            Listing,
            repr(source),
            where,
            lambda: _ask(source, where, options.network),
        )
    if not listing.files:
        raise LockstepError(
            f"{listing.read}: found no file that fits {', '.join(source.files)} and ends in "
            f"{', '.join(ENDINGS)}; a pattern such as *.md reads text of another ending"
        )
    return listing


def _local(source: TextSource, root: Path) -> Listing:
    if root.is_file():
        return _listing(source, [local_file(root, root.parent)], is_file=True)
    files = [local_file(path, root) for _, path in walk(root, hidden=False)]
    return check_local(_listing(source, files), root)


def _ask(source: TextSource, where: str, network: Network) -> Listing:
    name = source.source.strip()
    scheme, is_address, rest = name.partition("://")
    if not is_address and REPO_ID.fullmatch(name):
        return _on_hub(source, name, f"{where}: {name}", network)
    if not is_address:
        raise LockstepError(
            f"{where}: found no {Path(name).absolute()}, expected a file or folder, an address, or "
            "owner/name of a dataset on the hub"
        )
    _refuse_of_hub(source, where)
    if scheme in ("http", "https"):
        return _listing(source, files_at([name], network), is_file=True)
    if scheme in ("gs", "gcs"):
        bucket, _, folder = rest.partition("/")
        return _listing(source, list_bucket(bucket, folder, network))
    return _listing(source, list_files(name, scheme, network))


def _on_hub(source: TextSource, name: str, where: str, network: Network) -> Listing:
    commit, files = list_dataset(name, source.revision, where, network)
    if source.revision != commit:
        advice = hub_files.pin_advice(where, commit, "revision")
        log.warning(f"download: warning: {advice}")
    says = {"repo_id": name, "commit": commit}
    if source.subset is not None:
        says |= {"subset": source.subset, "split": source.split}
        files = _of_subset(source, files, where, network)
    elif source.files == EVERYTHING:
        _warn_of_subsets(files, where, network)
    return _listing(source, files, says, " on the hub")


def _listing(
    source: TextSource,
    files: Iterable[LocationFile],
    says: dict[str, str] | None = None,
    on: str = "",
    *,
    is_file: bool = False,
) -> Listing:
    """Return those of the files that are wanted; `is_file` says that the source names the file."""
    # a pattern that ends in an ending names it too, and plain text may have any
    named = {PurePosixPath(pattern).suffix.lower() for pattern in source.files}
    endings = (*ENDINGS, *(suffix for suffix in named if suffix.strip(".").isalnum()))

    def fits(name: str) -> bool:
        hidden = any(part.startswith(".") for part in name.split("/"))
        wanted = any(fnmatch(name, pattern) for pattern in source.files)
        return wanted and not hidden and (is_file or name.lower().endswith(endings))

    found = [file for file in sorted(files, key=lambda file: file.name) if fits(file.name)]
    if source.files == EVERYTHING:  # beside files of text, a .json says something else
        found = [file for file in found if not file.name.lower().endswith(".json")] or found
    return Listing(
        read=hide(source.source.strip()) + on,
        token_size_in_bytes="FourBytes",
        shuffle=ShuffleDontShuffle(),
        files=tuple(found),
        says=says or {},
    )


def _of_subset(
    source: TextSource, files: Iterable[LocationFile], where: str, network: Network
) -> list[LocationFile]:
    readme = _readme(files)
    if readme is None or readme.origin.size > subset.MOST_BYTES:
        found = "none" if readme is None else f"one of {readme.origin.size} bytes"
        raise LockstepError(
            f"{where}: README.md: found {found}, expected one of at most {subset.MOST_BYTES} bytes "
            f"with subset {source.subset!r}"
        )
    content = b"".join(remote.read(readme.origin, 0, readme.origin.size, network))
    given = (source.subset, source.split)
    wanted = subset.patterns(content, *given, f"{where}: README.md")
    return [file for file in files if any(fnmatch(file.name, pattern) for pattern in wanted)]


def _warn_of_subsets(files: Iterable[LocationFile], where: str, network: Network) -> None:
    """Warn that all subsets of a dataset are read, if its README.md lists several."""
    readme = _readme(files)
    if readme is None or readme.origin.size > subset.MOST_BYTES:
        return
    content = b"".join(remote.read(readme.origin, 0, readme.origin.size, network))
    try:
        listed = subset.names(content, f"{where}: README.md")
    except LockstepError:
        return  # nobody asked for a subset of it
    if len(listed) > 1:
        log.warning(
            f"download: warning: {where}: all files are read, of the subsets "
            f"{brief(', '.join(listed), 200)}; set subset to read one of them"
        )


def _readme(files: Iterable[LocationFile]) -> LocationFile | None:
    return next((file for file in files if file.name == subset.README), None)


def _refuse_of_hub(source: TextSource, where: str) -> None:
    for key in ("revision", "subset"):
        if (value := getattr(source, key)) is not None:
            raise LockstepError(
                f"{where}.{key} is {value!r}, expected none: {hide(source.source)} is not a "
                "dataset on the hub"
            )
