"""The files of text that a run file names: on this disk, at an address, in a bucket, on the hub.

The subsets of a dataset on the hub are patterns of files, in the front matter of its README.md:

    configs:
    - config_name: sample-10BT
      data_files:
      - split: train
        path: sample/10BT/*

`data_files` may also be a pattern or a list of patterns, which are then of the split train. As on
the hub, a subset's patterns begin in its `data_dir`, `*` ends at a slash, and `**` is any folders.
"""

import logging
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Annotated

import yaml
from pydantic import Field

from lockstep.errors import LockstepError, brief, expecting, hide
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.validation import validate
from pipeline.net import remote
from pipeline.net.transfers import store
from pipeline.runfile import Network
from pipeline.runfile.data import ShuffleDontShuffle, TextSource
from pipeline.sources.provider import FetchOptions
from pipeline.sources.text.documents import ENDINGS
from pipeline.sources.token_files.listing import Listing, LocationFile, check_local, local_file
from pipeline.sources.token_files.remote_files import (
    REPO_ID,
    files_at,
    list_bucket,
    list_dataset,
    list_files,
)
from pipeline.stage.untrusted_files import expand, load_yaml, walk

log = logging.getLogger(__name__)

README = "README.md"
MOST_README = 2**20  # bytes
YAML_FENCE = "---\n"
Pattern = Annotated[str, Field(min_length=1, max_length=500)]
Patterns = Annotated[tuple[Pattern, ...], Field(max_length=10_000), AsTuple]
FILE_KEYS = ("source", "revision", "subset", "split", "files")  # keys that say which files are read
EVERY_FILE = TextSource.model_fields["files"].default


def files_of(source: TextSource, where: str, options: FetchOptions) -> Listing:
    """Return a source's text files by name; offline, those that were listed last.

    Errors name `where`, its place in the run file.
    """
    root = expand(source.source, where)
    if root.exists():
        _refuse_of_hub(source, where)
        listing = _local(source, root)
    else:
        listing = store.remembered(
            options.store,
            Listing,
            f"text {[getattr(source, key) for key in FILE_KEYS]!r}",
            where,
            lambda: _ask(source, where, options.network),
        )
    if not listing.files:
        raise LockstepError(
            f"{listing.read}: found no file that matches {', '.join(source.files)} and ends in "
            f"{', '.join(ENDINGS)}; a pattern such as *.md reads text with another ending"
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
    says, files = list_dataset(name, source.revision, where, network, key="revision")
    if source.subset is not None:
        says |= {"subset": source.subset, "split": source.split}
        files = _of_subset(source, files, where, network)
    elif source.files == EVERY_FILE:
        _warn_of_subsets(files, where, network)
    return _listing(source, files, says, " on the hub")


def _listing(
    source: TextSource,
    files: Iterable[LocationFile],
    says: dict[str, str] | None = None,
    place: str = "",
    *,
    is_file: bool = False,
) -> Listing:
    """Return the text files that a source wants; `is_file` says that the source names the file."""
    # a pattern that ends in an ending names it too, and plain text may have any
    suffixes = {PurePosixPath(pattern).suffix.lower() for pattern in source.files}
    endings = (*ENDINGS, *(suffix for suffix in suffixes if suffix.strip(".").isalnum()))

    def fits(name: str) -> bool:
        hidden = any(part.startswith(".") for part in name.split("/"))
        wanted = any(fnmatch(name, pattern) for pattern in source.files)
        return wanted and not hidden and (is_file or name.lower().endswith(endings))

    chosen = [file for file in sorted(files, key=lambda file: file.name) if fits(file.name)]
    if source.files == EVERY_FILE:  # beside files of text, a .json says something else
        chosen = [file for file in chosen if not file.name.lower().endswith(".json")] or chosen
    return Listing(
        read=hide(source.source.strip()) + place,
        token_size_in_bytes="FourBytes",
        shuffle=ShuffleDontShuffle(),
        files=tuple(chosen),
        says=says or {},
    )


def _refuse_of_hub(source: TextSource, where: str) -> None:
    for key in ("revision", "subset"):
        if (value := getattr(source, key)) is not None:
            raise LockstepError(
                f"{where}.{key} is {value!r}, expected none: {hide(source.source)} is not a "
                "dataset on the hub"
            )


# ---- Subsets of a dataset ----


class SplitFiles(Table, extra="ignore"):
    """The files of one split."""

    split: Pattern = "train"
    path: Pattern | Patterns


class HubSubset(Table, extra="ignore"):
    """A subset of a dataset's text files, which the hub calls a config."""

    config_name: Pattern
    data_dir: Pattern = "."
    data_files: (
        Pattern | Annotated[tuple[SplitFiles | Pattern, ...], Field(max_length=1000), AsTuple]
    ) = ()


class FrontMatter(Table, extra="ignore"):
    """The keys of a README.md's front matter that are used."""

    configs: Annotated[tuple[HubSubset, ...], Field(max_length=10_000), AsTuple] = ()


def _of_subset(
    source: TextSource, files: Iterable[LocationFile], where: str, network: Network
) -> list[LocationFile]:
    """Return the files of the subset and split that a source names."""
    where = f"{where}: {README}"
    content = _read_readme(files, network)
    if content is None:
        raise LockstepError(
            f"{where}: missing, or larger than {MOST_README} bytes, expected one that lists the "
            f"subset {source.subset!r}"
        )
    by_name = subsets(content, where)
    if source.subset not in by_name:
        names = brief(", ".join(by_name), 200) or "none"
        raise LockstepError(
            f"{where}: found the subsets {names}, expected {source.subset!r} among them"
        )
    by_split: dict[str, list[str]] = {}
    subset = by_name[source.subset]
    data_files = subset.data_files
    for entry in (data_files,) if isinstance(data_files, str) else data_files:
        part = SplitFiles(path=entry) if isinstance(entry, str) else entry
        paths = (part.path,) if isinstance(part.path, str) else part.path
        by_split.setdefault(part.split, []).extend(paths)
    if not by_split.get(source.split):
        names = brief(", ".join(by_split), 200) or "none"
        raise LockstepError(
            f"{where}: found the splits {names} in subset {source.subset!r}, expected "
            f"{source.split!r} among them"
        )
    wanted = [normpath(f"{subset.data_dir}/{pattern}") for pattern in by_split[source.split]]
    return [file for file in files if any(_matches(file.name, pattern) for pattern in wanted)]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of the hub, with `**` for folders, fits a text file's name."""
    parts = name.split("/")
    reached = {0}  # how many leading parts of the name what was read of the pattern fits
    for wanted in pattern.split("/"):
        if wanted == "**":
            reached = {*range(min(reached, default=len(parts) + 1), len(parts) + 1)}
        else:
            reached = {n + 1 for n in reached if n < len(parts) and fnmatch(parts[n], wanted)}
    return len(parts) in reached


def _warn_of_subsets(files: Iterable[LocationFile], where: str, network: Network) -> None:
    """Warn that all subsets of a dataset are read, if its README.md lists several."""
    content = _read_readme(files, network)
    try:
        listed = subsets(content or b"", f"{where}: {README}")
    except LockstepError:
        return  # nobody asked for a subset of it
    if len(listed) > 1:
        log.warning(
            f"download: warning: {where}: all files are read, of the subsets "
            f"{brief(', '.join(listed), 200)}; set subset to read one of them"
        )


def _read_readme(files: Iterable[LocationFile], network: Network) -> bytes | None:
    """Return the README.md beside text files; None if it has none that is small enough."""
    origin = next((file.origin for file in files if file.name == README), None)
    if origin is None or origin.size > MOST_README:
        return None
    return b"".join(remote.read(origin, 0, origin.size, network))


def subsets(readme: bytes, where: str) -> dict[str, HubSubset]:
    """Return the subsets of text files that a README.md's front matter lists, by name."""
    text = readme.decode(errors="replace").replace("\r\n", "\n")
    beginning, _, rest = text.partition(YAML_FENCE)
    front, fence, _ = rest.partition(f"\n{YAML_FENCE}")
    if beginning or not fence:
        return {}
    with expecting(where, "YAML in front of it", yaml.YAMLError, RecursionError, ValueError):
        document = load_yaml(front, where)
    matter = validate(FrontMatter, document if isinstance(document, dict) else {}, where)
    return {config.config_name: config for config in matter.configs}
