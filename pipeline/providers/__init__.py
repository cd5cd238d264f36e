"""Where shards come from: one module for each data location, named in one table.

A provider module has one function that the stage `download` calls:

  fetch(location, folder, progress) -> Fetched

It fills an empty folder with `train/NNNNN.ds`, `held_out/NNNNN.ds` and, where there is a tokenizer,
`tokenizer/` in Hugging Face form. It sees to it that every token id is below `vocab_size`, since it
alone can name the file that the user knows. `location` is the variant of `model.LLM.data_location`
in the run file; `progress(total=..., unit=...)` is a bar for each part of the work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pipeline.errors import LockstepError
from pipeline.locations import Data, DataCorpus, DataLocal, Shuffle
from pipeline.progress import Progress
from pipeline.table import variant_name

# A location in the run file -> the module here that fetches it. A new provider is a line.
PROVIDERS = {DataCorpus: "corpus", DataLocal: "local"}

TRAIN, HELD_OUT, TOKENIZER = "train", "held_out", "tokenizer"

MakeBar = Callable[..., Progress]


@dataclass(frozen=True)
class Fetched:
    """What a provider says of the files that it wrote.

    Args:
      token_size_in_bytes: 2 or 4, of every file.
      vocab_size: every token id is smaller; None where nothing says so.
      shuffle: the order in which the sequences of the train split are used.
      source: what was read, as JSON; goes into `shards.json`. Its `sha256` is over names and
        contents, so that two equal ones mean the same data.
      warnings: one line each, for the user.
    """

    token_size_in_bytes: int
    vocab_size: int | None
    shuffle: Shuffle
    source: dict
    warnings: tuple[str, ...] = ()


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Where the `number`-th token file of a split goes: its name gives its place in the order."""
    return folder / split / f"{number:05}.ds"


def get(location: Data) -> ModuleType:
    """The provider of a data location.

    Raises:
      LockstepError: there is none for it.
    """
    if type(location) not in PROVIDERS:
        known = " or ".join(known.tag() for known in PROVIDERS)
        raise LockstepError(
            f"{variant_name(location)}: this release cannot fetch it, expected {known}"
        )
    return import_module(f"pipeline.providers.{PROVIDERS[type(location)]}")
