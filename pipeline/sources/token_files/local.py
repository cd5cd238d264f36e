"""`data_location.Local`: a folder of token files of this machine, copied.

They are read in the order of their names (Psyche takes the order in which the system lists them).
Only files of the folder itself are read, and of sub-folders that are named after a split, such as
`train/` and `held_out/`.
"""

from pathlib import Path

from lockstep.errors import LockstepError
from pipeline.runfile import Network
from pipeline.runfile.data import DataLocal
from pipeline.sources.provider import HELD_OUT, TOKENIZER, TRAIN
from pipeline.sources.token_files.fetching import provider
from pipeline.sources.token_files.listing import (
    EXTENSIONS,
    Listing,
    check_local,
    listing_fields,
    local_file,
    token_files,
)
from pipeline.stage.untrusted_files import expand, walk
from pipeline.tokens import signs
from pipeline.tokens.tokenizer_files import KINDS

PATH = "model.LLM.data_location.Local"


def listing(location: DataLocal, network: Network) -> Listing:
    """Return the folder's token files, and its tokenizer.

    Raises:
      LockstepError: there is no such folder, or a `tokenizer/` in it without a tokenizer; or a file
        is a link out of the folder.
    """
    root = expand(location.path, PATH)
    if not root.is_dir():
        raise LockstepError(
            f"{PATH}: found no folder {root.absolute()}, expected one of "
            f"{', '.join(EXTENSIONS)} files"
        )
    tokenizer = root / TOKENIZER
    if tokenizer.is_dir() and not any((tokenizer / kind).is_file() for kind in KINDS):
        raise LockstepError(f"{tokenizer}: found no tokenizer.json, expected one")
    names = (TRAIN, *signs.HELD_OUT_SPLITS, TOKENIZER)
    files = [
        local_file(path, root)
        for folder in (root, *(root / name for name in names))
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.is_file() or (path.name.endswith(EXTENSIONS) and not path.is_dir())
    ]
    result = Listing(
        read=location.path,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        **listing_fields(files),
        says_held_out=(root / HELD_OUT).is_dir(),
    )
    if not result.files and (below := _below(root)):
        raise LockstepError(
            f"{PATH}: {root.absolute()} has no {', '.join(EXTENSIONS)} files but {below}, expected "
            f"them in the folder itself or in {TRAIN}/ and {HELD_OUT}/"
        )
    return check_local(result, root)


def _below(root: Path) -> str | None:
    """Return the name of the first token file in a folder further below."""
    files = (local_file(path, root) for _, path in walk(root, hidden=False) if path.is_file())
    return next((file.name for file in token_files(files)), None)


PROVIDER = provider(listing, is_local=True)
