"""The default run with another model and another optimizer, for benchmarks."""

from benchmarks import sizes
from lockstep.methods import CARDS
from pipeline.runfile.like import tables_like, with_tokens


def document(size: str, name: str, rounds: int, local_steps: int | None = None) -> dict:
    """The tables of a run of so many rounds, at the rate that is stated for the optimizer.

    Args:
      size: of `sizes.SIZES`.
      name: of `CARDS`.
      rounds: Each has as many tokens for each local step as the size says.
      local_steps: Other than the card's, of an optimizer that takes some.
    """
    card = CARDS[name]
    if local_steps and "inner_steps" in card.settings:
        card = card._replace(settings=card.settings | {"inner_steps": local_steps})
    base = sizes.load(sizes.document(sizes.SIZES[size]))
    a_round = base.config.global_batch_size_end * base.llm.max_seq_len
    tables, _ = tables_like(with_tokens(base, rounds * card.local_steps * a_round), card, None)
    tables["held_out"]["every"] = max(1, rounds // 10)
    tables["witness"]["snapshot_every"] = rounds  # nobody audits: fewer snapshots, less disk
    return tables
