"""Stage download: `model.LLM.data_location` -> data/shards, token files and tokenizer.

With `[download] stream` the token files stay where they are: data/shards says where that is.
"""

import logging

from lockstep.errors import LockstepError
from lockstep.tables.variant import variant_name
from pipeline import runfile, sources
from pipeline.net.transfers import store
from pipeline.sources.provider import FetchOptions, opened_options
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths
from pipeline.tokens import seen
from pipeline.tokens.rows import described
from pipeline.tokens.shards import Shards, duplicates, write_shards

log = logging.getLogger(__name__)


def run(run: runfile.Run, paths: Paths) -> None:
    """Download what the run file names, and list it in `shards.json`.

    Raises:
      LockstepError: the location has no provider, cannot be read, or differs from `[pins] data`.
    """
    with opened_options(run, paths) as options:
        _run(run, paths, options)


def _run(run: runfile.Run, paths: Paths, options: FetchOptions) -> None:
    location = run.llm.data_location
    sources.provider_of(location, options)  # raises before any work
    if run.pins.data and (source_sha256 := sources.source_sha256(location, options)):
        # first: with other data than those pinned, other settings of the run could fail
        pins.check("data", run.pins.data, source_sha256, variant_name(location))
    with paths.building() as folder:
        fetched = sources.fetch(location, folder, options)
        share = seen.share(folder, fetched)
        fetched = fetched.model_copy(update={"held_out_seen": share})
        write_shards(folder, fetched)
        read, sha256 = fetched.source["read"], fetched.source["sha256"]
        try:
            pinned = pins.check("data", run.pins.data, sha256, read)
        except LockstepError:
            store.forget(paths.store, fetched.unproven)  # it may have been damaged on its way
            raise
    repeats = [f"{one} and {other} are the same file" for one, other in duplicates(fetched)]
    for warning in (*fetched.warnings, *repeats):
        log.warning(f"download: warning: {warning}")
    log.info(f"download: read {read} (sha256 {sha256[:12]}, {pinned})")
    log.info(f"download: {summary(fetched)}")


def summary(shards: Shards) -> str:
    """Return one line about the downloaded shards."""
    rows = shards.rows
    width, unit = (len(shards.columns), "tokens") if rows is None else (rows.words, "rows")
    counts = [
        f"{sum(file.tokens for file in shards.split(split)) // width:,} {split} {unit} "
        f"in {len(shards.split(split))} files"
        for split in ("train", "held_out")
    ]
    if rows is not None:
        return f"{', '.join(counts)}; {width:,} words of 4 bytes a row: {described(rows)}"
    vocab = "unknown" if shards.vocab_size is None else f"{shards.vocab_size:,}"
    if any(file.origin for file in shards.files):
        counts.append("read while training")
    size = shards.token_size_in_bytes
    return f"{', '.join(counts)}; vocabulary {vocab}, {size} bytes a token"
