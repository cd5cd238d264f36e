"""Stage download: `model.LLM.data_location` -> data/shards, token files and tokenizer."""

import logging
from functools import partial

from pipeline import providers, tokens
from pipeline.artifacts import Paths
from pipeline.config import Run
from pipeline.progress import Progress

log = logging.getLogger(__name__)


def run(config: Run, paths: Paths) -> None:
    """Fetches what the run file names, and lists it in `shards.json`.

    Raises:
      LockstepError: there is no provider for the location, or as the provider says.
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
    for warning in fetched.warnings:
        log.warning(f"download: warning: {warning}")
    for line in summary(shards):
        log.info(f"download: {line}")


def summary(shards: tokens.Shards) -> list[str]:
    """What was read and what came of it, in two lines."""
    read = f"{shards.source['read']} (sha256 {shards.source['sha256'][:12]}, not pinned)"
    found = [
        f"{sum(file.tokens for file in shards.split(split)):,} {split} tokens "
        f"in {len(shards.split(split))} files"
        for split in ("train", "held_out")
    ]
    vocab = "unknown" if shards.vocab_size is None else f"{shards.vocab_size:,}"
    return [
        f"read {read}",
        f"{', '.join(found)}; vocabulary {vocab}, {shards.token_size_in_bytes} bytes a token",
    ]
