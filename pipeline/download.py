"""Stage download: `model.LLM.data_location` -> data/shards, token files and tokenizer.

With `[download] stream` the token files stay where they are: data/shards says where that is.
"""

import logging

from pipeline import sources as providers
from pipeline.errors import LockstepError
from pipeline.net import store
from pipeline.runfile import Run
from pipeline.sources import wanted
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths
from pipeline.tokens import sequences as tokens

log = logging.getLogger(__name__)


def run(config: Run, paths: Paths) -> None:
    """Fetches what the run file names, and lists it in `shards.json`.

    Raises:
      LockstepError: there is no provider for the location, as the provider says, or what was read
        is not what `[pins] data` holds.
    """
    location = config.llm.data_location
    provider = providers.get(location)
    with paths.building() as folder:
        fetched = provider.fetch(location, folder, wanted(config, paths))
        shards = tokens.Shards(
            format=2,
            token_size_in_bytes=fetched.token_size_in_bytes,
            vocab_size=fetched.vocab_size,
            shuffle=fetched.shuffle,
            parts=fetched.parts,
            columns=fetched.columns,
            files=fetched.files,
            source=fetched.source,
        )
        tokens.write_shards(folder, shards)
        read, sha256 = shards.source["read"], shards.source["sha256"]
        try:
            pinned = pins.check("data", config.pins.data, sha256, read)
        except LockstepError:
            store.forget(paths.store, fetched.unproven)  # it may have been spoilt on its way
            raise
    same = [f"{one} and {other} are the same file" for one, other in tokens.duplicates(shards)]
    for warning in (*fetched.warnings, *same):
        log.warning(f"download: warning: {warning}")
    log.info(f"download: read {read} (sha256 {sha256[:12]}, {pinned})")
    log.info(f"download: {summary(shards)}")


def summary(shards: tokens.Shards) -> str:
    """What came of it, in a line."""
    columns = len(shards.columns)
    found = [
        f"{sum(file.tokens for file in shards.split(split)) // columns:,} {split} tokens "
        f"in {len(shards.split(split))} files"
        for split in ("train", "held_out")
    ]
    vocab = "unknown" if shards.vocab_size is None else f"{shards.vocab_size:,}"
    where = ", read while training" if any(file.origin for file in shards.files) else ""
    return (
        f"{', '.join(found)}{where}; vocabulary {vocab}, {shards.token_size_in_bytes} bytes a token"
    )
