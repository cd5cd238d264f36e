"""Listings: which files of tokens a data location has, and what servers say of each.

Files that end in .ds, .bin or .npy are raw tokens, as Psyche reads them, without a header. Some
others say something of them (signs.py). A tokenizer comes from a folder `tokenizer/`, where it may
be in an older form, or from a `tokenizer.json` beside the files.
"""

from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from lockstep.errors import hide
from lockstep.tables.table import Table
from lockstep.tables.variant import variant_name
from pipeline.net.host import check_name
from pipeline.net.origin import Origin
from pipeline.net.transfers import store
from pipeline.runfile.data import TOKEN_BYTES, AnyShuffle, Data, TokenSize
from pipeline.sources.provider import TOKENIZER, FetchOptions
from pipeline.stage.given_files import check_file, stamp
from pipeline.tokens import signs
from pipeline.tokens.shards import Part
from pipeline.tokens.tokenizer_files import KINDS, TOKENIZER_FILES

EXTENSIONS = (".ds", ".bin", ".npy")


class LocationFile(Table):
    """A file of a location."""

    name: str
    """Path in the location."""
    origin: Origin
    """Where its bytes are."""
    part: Annotated[int, Field(ge=0)] = 0
    """Number of its location, where several are mixed."""

    @property
    def label(self) -> str:
        """The file's address for errors, without credentials."""
        return self.origin.url if self.origin.is_local else hide(self.origin.url.partition("#")[0])


class Listing(Table):
    """The files of a location, in the order in which they are read."""

    read: str
    """Description of the location."""
    token_size_in_bytes: TokenSize
    """Size of a token in every file."""
    shuffle: AnyShuffle
    """Order of the train split."""
    files: tuple[LocationFile, ...]
    """Its token files, in order."""
    tokenizer: tuple[LocationFile, ...] = ()
    """The files of its tokenizer; each name is one of TOKENIZER_FILES."""
    beside: tuple[LocationFile, ...] = ()
    """Files that say something of its token files; see signs.py."""
    parts: tuple[Part, ...] = ()
    """Locations that are mixed, if there are several."""
    says_held_out: bool = False
    """Whether it names the held-out files, even if there are none."""
    says: dict[str, str] = {}
    """What else is recorded: the hub's commit."""

    @property
    def size(self) -> int:
        """Bytes of a token."""
        return TOKEN_BYTES[self.token_size_in_bytes]


def remembered(location: Data, options: FetchOptions, ask: Callable[[], Listing]) -> Listing:
    """Return what `ask` lists; offline, what it listed the last time."""
    where = variant_name(location)
    return store.remembered(options.store, Listing, repr(location), where, ask)


def held_by(files: Iterable[LocationFile]) -> dict[str, tuple[LocationFile, ...]]:
    """Return what a listing has of these files of a location, by the listing's field."""
    files = tuple(files)
    tokens = token_files(files)
    wanted = {beside for file in tokens for beside in signs.beside(file.name)}
    return {
        "files": tokens,
        "tokenizer": tokenizer_files(files),
        "beside": tuple(file for file in files if file.name in wanted),
    }


def token_files(files: Iterable[LocationFile]) -> tuple[LocationFile, ...]:
    """Return the files that hold tokens, by their names; not hidden ones, nor a tokenizer's."""

    def holds_tokens(name: str) -> bool:
        *folders, base = PurePosixPath(name).parts
        return base.endswith(EXTENSIONS) and base[0] != "." and TOKENIZER not in folders

    return tuple(file for file in files if holds_tokens(file.name))


def tokenizer_files(files: Iterable[LocationFile]) -> tuple[LocationFile, ...]:
    """Return the files of the tokenizer in `tokenizer/`, or beside the others, by their names."""
    by_name = {file.name: file for file in files}
    # beside other files, a vocab.json may be of something else
    for folder, kinds in ((f"{TOKENIZER}/", KINDS), ("", KINDS[:1])):
        if any(f"{folder}{kind}" in by_name for kind in kinds):
            return tuple(
                by_name[f"{folder}{name}"].model_copy(update={"name": name})
                for name in TOKENIZER_FILES
                if f"{folder}{name}" in by_name
            )
    return ()


def local_file(path: Path, root: Path) -> LocationFile:
    """Describe a file of this machine."""
    size, nanoseconds = stamp(path)
    origin = Origin(url=str(path.absolute()), size=size, tag=str(nanoseconds))
    return LocationFile(name=path.relative_to(root).as_posix(), origin=origin)


def check_local(listing: Listing, root: Path) -> Listing:
    """Return the listing of a folder of this machine if its files are in it.

    Raises:
      LockstepError: one is no regular file, a link out of the folder, or has a name that cannot be
        printed.
    """
    for file in (*listing.files, *listing.tokenizer, *listing.beside):
        check_name(file.name, str(root))
        check_file(Path(file.origin.url), root)
    return listing
