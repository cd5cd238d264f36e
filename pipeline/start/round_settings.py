"""What a round reads of a run file."""

from lockstep.protocol import links
from lockstep.protocol.closing import Closing
from lockstep.protocol.consensus import ElectedWitnesses, SharedStore
from lockstep.protocol.driver import RoundSettings
from pipeline import runfile


def round_settings(run: runfile.Run) -> RoundSettings:
    """Return the settings of a run's rounds."""
    in_store = run.links.clock == "store"
    closing = Closing(
        limit=run.config.max_round_train_time,
        most_rows=run.config.global_batch_size_end,
        fewest=run.config.min_clients if in_store else None,  # volunteers come and go
    )
    every, last = run.witness.snapshot_every, run.config.total_steps
    speeds = links.speeds(run.links, run.peers.count)
    return RoundSettings(
        coordinator=run.config,
        links=run.links,
        peers=run.peers.count,
        seed=run.peers.seed,
        row_tokens=run.llm.max_seq_len,
        micro_batch=run.peers.micro_batch,
        stores_epochs=bool(run.config.checkpointers),
        reports=SharedStore() if in_store else ElectedWitnesses(),
        closing=run.llm.optimizer.closing(closing, speeds, settle_every=every, last=last),
    )
