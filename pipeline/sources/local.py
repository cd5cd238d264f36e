"""`data_location.Local`: a folder of token files of this machine, copied.

They are read in the order of their names (Psyche takes the order in which the system lists them).
Only files of the folder itself are read, and of its sub-folder `held_out/`.
"""

from pipeline.errors import LockstepError
from pipeline.runfile import Network
from pipeline.runfile.data import DataLocal
from pipeline.sources import HELD_OUT, TOKENIZER
from pipeline.sources.listing import (
    EXTENSIONS,
    Listing,
    check_local,
    local_file,
    token_files,
    tokenizer_files,
)
from pipeline.stage.given_files import expand
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
    files = [
        local_file(path, root)
        for folder in (root, root / HELD_OUT, root / TOKENIZER)
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.is_file() or (path.name.endswith(EXTENSIONS) and not path.is_dir())
    ]
    found = Listing(
        read=location.path,
        token_size_in_bytes=location.token_size_in_bytes,
        shuffle=location.shuffle,
        files=token_files(files),
        tokenizer=tokenizer_files(files),
        says_held_out=(root / HELD_OUT).is_dir(),
    )
    return check_local(found, root)
