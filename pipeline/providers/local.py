"""`data_location.Local`: a folder of token files, copied.

Files that end in .ds, .bin or .npy are raw tokens, as Psyche reads them: no header is parsed, not
even of a .npy (one that has a header is refused; Psyche would train on it). They are read in the
order of their names (Psyche takes the order in which the system lists them). Those in the
sub-folder `held_out/` are the held-out split; without that sub-folder, the last file is, and where
there is but one file nothing is: a warning says so in both cases.

A tokenizer is copied from the sub-folder `tokenizer/`, or from a `tokenizer.json` in the folder.
"""

import os
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.artifacts import listing_sha256, sha256_file
from pipeline.errors import LockstepError
from pipeline.locations import TOKEN_BYTES, DataLocal
from pipeline.providers import (
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Fetched,
    MakeBar,
    shard_path,
)
from pipeline.tokens import check_file_ids, count_tokens

EXTENSIONS = (".ds", ".bin", ".npy")
NUMPY_MAGIC = b"\x93NUMPY"
# What a tokenizer in Hugging Face form may consist of. Nothing else is copied: no code, no pickle.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def fetch(location: DataLocal, folder: Path, progress: MakeBar) -> Fetched:
    """Copies a folder's token files, and its tokenizer where it has one.

    Raises:
      LockstepError: the folder or its token files are not there, a file is empty, of odd length or
        not readable, an id lies beyond the tokenizer's vocabulary, or that is no tokenizer.
    """
    root = Path(location.path).expanduser()
    if not root.is_dir():
        raise LockstepError(
            f"model.LLM.data_location.Local: found no folder {root.absolute()}, expected one of "
            f"{', '.join(EXTENSIONS)} files"
        )
    files, warnings = split_files(root)
    size = TOKEN_BYTES[location.token_size_in_bytes]
    tokenizer, vocab_size = tokenizer_folder(root), None
    if tokenizer:
        vocab_size = count_vocab(tokenizer / "tokenizer.json")
        copy_tokenizer(tokenizer, folder / TOKENIZER)

    read = {}
    with progress(total=sum(map(len, files.values())), unit="files copied") as bar:
        for split, paths in files.items():
            (folder / split).mkdir()
            for number, path in enumerate(paths):
                check_file(path, size, vocab_size)
                copy = shard_path(folder, split, number)
                shutil.copyfile(path, copy)
                read[path.relative_to(root).as_posix()] = sha256_file(copy)
                bar.advance()
    return Fetched(
        token_size_in_bytes=size,
        vocab_size=vocab_size,
        shuffle=location.shuffle,
        source={
            "read": str(location.path),
            "files": {
                split: [path.relative_to(root).as_posix() for path in paths]
                for split, paths in files.items()
            },
            "sha256": listing_sha256(read.items()),
        },
        warnings=warnings,
    )


def split_files(root: Path) -> tuple[dict[str, list[Path]], tuple[str, ...]]:
    """The token files of each split, by name; and a warning where what is held out was not said.

    Raises:
      LockstepError: there are no token files.
    """
    train = token_files(root)
    held_out, warnings = [], ()
    if (root / HELD_OUT).is_dir():
        held_out = token_files(root / HELD_OUT)
    elif len(train) > 1:
        *train, last = train
        held_out = [last]
        warnings = (f"{root}: no folder {HELD_OUT}/, so the last file, {last.name}, is held out",)
    else:
        warnings = (f"{root}: no folder {HELD_OUT}/ and one file, so nothing is held out",)
    if not train:
        raise LockstepError(f"{root}: found no file that ends in {', '.join(EXTENSIONS)}")
    return {TRAIN: train, HELD_OUT: held_out}, warnings


def token_files(folder: Path) -> list[Path]:
    """The token files in a folder, not below it, by name; hidden ones are no data."""
    return sorted(
        (
            path
            for path in folder.iterdir()
            if path.suffix in EXTENSIONS and path.is_file() and not path.name.startswith(".")
        ),
        key=lambda path: path.name,
    )


def check_file(path: Path, token_size_in_bytes: int, vocab_size: int | None) -> None:
    """Sees that a file can be read, and is whole tokens of the vocabulary.

    Raises:
      LockstepError: it cannot or is not; names the file.
    """
    if not os.access(path, os.R_OK):
        raise LockstepError(f"{path}: no permission, expected a file to read")
    count_tokens(path, token_size_in_bytes)
    with open(path, "rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise LockstepError(
                f"{path}: found a NumPy header, expected tokens alone, as `tofile` writes them"
            )
    check_file_ids(path, token_size_in_bytes, vocab_size)


def tokenizer_folder(root: Path) -> Path | None:
    """The folder in which the tokenizer lies, or None.

    Raises:
      LockstepError: there is a `tokenizer/` without a tokenizer.json.
    """
    below = root / TOKENIZER
    folder = below if below.is_dir() else root
    if (folder / "tokenizer.json").is_file():
        return folder
    if folder == below:
        raise LockstepError(f"{below}: found no tokenizer.json, expected one")
    return None


def count_vocab(tokenizer_json: Path) -> int:
    """One more than the largest token id, added tokens included.

    Raises:
      LockstepError: the file is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises bare Exceptions
        raise LockstepError(
            f"{tokenizer_json}: expected a tokenizer of the `tokenizers` library: {error}"
        ) from error
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def copy_tokenizer(source: Path, into: Path) -> None:
    """Copies those of TOKENIZER_FILES that are there."""
    into.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, into / name)
