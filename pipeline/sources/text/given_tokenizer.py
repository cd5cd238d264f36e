"""A tokenizer that is there already: in a folder, or on the Hugging Face hub."""

import shutil
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from pipeline.errors import LockstepError
from pipeline.net import hub_files
from pipeline.runfile.data import DataCorpus
from pipeline.stage.artifacts import listing_sha256, read_json, sha256_file
from pipeline.tokens.tokenizer_files import TOKENIZER_FILES

KEY = "model.LLM.data_location.Corpus.tokenizer"
# What ends a document, where no file of a tokenizer says it: the first of these that it has.
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class Given(NamedTuple):
    """A tokenizer, and where it is from.

    Attributes:
      folder: its files.
      source: what was read, as JSON; with the `sha256` of its files.
      warnings: one line each, for the user.
    """

    folder: Path
    source: dict
    warnings: tuple[str, ...]


def find(location: DataCorpus, cache: Path) -> Given:
    """The folder where `tokenizer` is one and no revision is given, else what the hub has.

    Raises:
      LockstepError: it is not there, cannot be read, or has no tokenizer.json.
    """
    folder, commit, warnings = Path(location.tokenizer).expanduser(), None, ()
    name, revision = f"{KEY}: {location.tokenizer}", location.tokenizer_revision
    if revision is not None or not folder.is_dir():
        if revision is not None:
            name += f" at {revision}"
        expected = "a folder with a tokenizer.json, or owner/name on the hub"
        folder = hub_files.download(
            name, location.tokenizer, revision, cache, TOKENIZER_FILES, expected
        )
        commit = folder.name
        if revision != commit:
            warnings = (hub_files.pin_advice(name, commit, "tokenizer_revision"),)
    files = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
    if "tokenizer.json" not in files:
        raise LockstepError(f"{name}: found no tokenizer.json, expected one")
    source = {
        "read": location.tokenizer,
        "revision": revision,
        "commit": commit,
        "sha256": listing_sha256((file, sha256_file(folder / file)) for file in files),
    }
    return Given(folder, source, warnings)


def copy(folder: Path, into: Path) -> None:
    """Copies a tokenizer's files, and nothing else."""
    into.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, into / name)


def load(folder: Path) -> Tokenizer:
    """Reads a folder's tokenizer.json.

    Raises:
      LockstepError: it is no tokenizer.
    """
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise LockstepError(
            f"{path}: expected a tokenizer of the `tokenizers` library: {error}"
        ) from error


def count_vocab(tokenizer: Tokenizer) -> int:
    """One more than the largest token id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_token(folder: Path, tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document: `eos_token` of the tokenizer's own files, else the
    first of ENDS that it has.

    Raises:
      LockstepError: it names one that it does not have, or has none.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _eos_token(folder / name)
        if token is not None:
            index = tokenizer.token_to_id(token)
            if index is None:
                raise LockstepError(
                    f"{folder / name}: eos_token is {token!r}, expected a token of the "
                    "tokenizer.json beside it"
                )
            return index
    for token in ENDS:
        index = tokenizer.token_to_id(token)
        if index is not None:
            return index
    raise LockstepError(
        f"{KEY}: {folder} has no token that ends a document, expected eos_token in its "
        f"tokenizer_config.json, or one of {', '.join(ENDS)}"
    )


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    said = read_json(path)
    if not isinstance(said, dict):
        raise LockstepError(f"{path}: found {type(said).__name__}, expected a table")
    token = said.get("eos_token")
    if isinstance(token, dict):  # as transformers 4 writes it
        token = token.get("content")
    if not isinstance(token, str | None):
        raise LockstepError(f"{path}: eos_token is {token!r:.60}, expected a string")
    return token
