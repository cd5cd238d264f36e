"""`data_location.Local`: a folder of token files of this machine, copied.

They are read in the order of their names (Psyche takes the order in which the system lists them).
Only the folder's own files are, and those of its sub-folder `held_out/`.
"""

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.net.remote import Origin
from pipeline.runfile.data import DataLocal
from pipeline.sources import HELD_OUT, TOKENIZER, Fetched, Survey, Wanted, listed


def survey(location: DataLocal, wanted: Wanted) -> Survey:
    """What a run would read of the folder."""
    return listed.survey(listing(location), wanted)


def fetch(location: DataLocal, folder: Path, wanted: Wanted) -> Fetched:
    """Copies a folder's token files, and its tokenizer where it has one.

    Raises:
      LockstepError: as `listing` and `listed.fetch_listed`.
    """
    return listed.fetch_listed(listing(location), folder, wanted)


def listing(location: DataLocal) -> listed.Listing:
    """The folder's token files, and its tokenizer.

    Raises:
      LockstepError: there is no such folder, or a `tokenizer/` in it without a tokenizer.json.
    """
    root = Path(location.path).expanduser()
    if not root.is_dir():
        raise LockstepError(
            f"model.LLM.data_location.Local: found no folder {root.absolute()}, expected one of "
            f"{', '.join(listed.EXTENSIONS)} files"
        )
    files = list(_files(root))
    tokenizer = listed.tokenizer_files(files)
    if (root / TOKENIZER).is_dir() and not (root / TOKENIZER / "tokenizer.json").is_file():
        raise LockstepError(f"{root / TOKENIZER}: found no tokenizer.json, expected one")
    return listed.Listing(
        read=location.path,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=listed.token_files(files),
        tokenizer=tokenizer,
        says_held_out=(root / HELD_OUT).is_dir(),
    )


def _files(root: Path) -> Iterator[listed.Listed]:
    """The files of the folder and of those in it that mean something, by name."""
    for folder in (root, root / HELD_OUT, root / TOKENIZER):
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.is_file():
                origin = Origin(url=str(path.absolute()), size=path.stat().st_size)
                yield listed.Listed(name=path.relative_to(root).as_posix(), origin=origin)
