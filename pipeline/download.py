"""Stage download: `model.LLM.data_location` -> data/shards, token files and tokenizer."""

import logging
from functools import partial

from pipeline import pins, providers, tokens
from pipeline.artifacts import Paths
from pipeline.config import Run
from pipeline.progress import Progress

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
        fetched = provider.fetch(location, folder, partial(Progress, "download"))
        shards = tokens.write_shards(
            folder,
            fetched.token_size_in_bytes,
            fetched.vocab_size,
            fetched.shuffle,
            fetched.source,
        )
        read, sha256 = shards.source["read"], shards.source["sha256"]
        pinned = pins.check("data", config.pins.data, sha256, read)
    for warning in fetched.warnings:
        log.warning(f"download: warning: {warning}")
    log.info(f"download: read {read} (sha256 {sha256[:12]}, {pinned})")
    log.info(f"download: {summary(shards)}")


def summary(shards: tokens.Shards) -> str:
    """What came of it, in a line."""
    found = [
        f"{sum(file.tokens for file in shards.split(split)):,} {split} tokens "
        f"in {len(shards.split(split))} files"
        for split in ("train", "held_out")
    ]
    vocab = "unknown" if shards.vocab_size is None else f"{shards.vocab_size:,}"
    return f"{', '.join(found)}; vocabulary {vocab}, {shards.token_size_in_bytes} bytes a token"
