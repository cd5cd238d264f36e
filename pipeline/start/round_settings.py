"""What a round reads of a run file."""

from lockstep.protocol import links
from lockstep.swarm.peers import RoundSettings
from pipeline import runfile


def round_settings(run: runfile.Run) -> RoundSettings:
    """Return the settings of a run's rounds."""
    return RoundSettings(
        coordinator=run.config,
        links=run.links,
        peers=run.peers.count,
        seed=run.peers.seed,
        row_tokens=run.llm.max_seq_len,
        most_rows=run.config.global_batch_size_end,
        micro_batch=run.peers.micro_batch,
        stores_epochs=bool(run.config.checkpointers),
        pace=run.llm.optimizer.pace(
            links.speeds(run.links, run.peers.count),
            run.rows_of_a_step,
            batch=run.config.global_batch_size_end,
            settle_every=run.witness.snapshot_every,
            last=run.config.total_steps,
        ),
    )
