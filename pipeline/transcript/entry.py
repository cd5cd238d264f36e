"""What a transcript says: its header, and one entry for each round. Strict, since it is read from
whoever wrote it. Docs: docs/reference/transcript.md.
"""

from typing import Any

from pipeline.protocol.dispute import Hash
from pipeline.protocol.round import Decision, Evidence, Round
from pipeline.runfile.table import Table

FORMAT = 2
TABLES = {"config", "model", "peers", "links"}  # of the run file, that Header.run holds


class Header(Table):
    """header.json."""

    format: int = FORMAT
    """Its version; see docs/reference/transcript.md."""
    key: str
    """Of the run's stage train."""
    run: dict[str, Any]
    """The tables of the run file that the rounds follow from."""
    model: dict[str, Any]
    """The model's config.json."""
    environment: dict[str, str]
    """What of the machine can change bits."""
    bitwise: bool
    """Whether a peer's step, taken twice before training, gave the same bits."""
    held_out_loss: float | None
    """Before the first round, nats per token; null where nothing is held out."""


class Entry(Table):
    """A line of rounds.jsonl: one round."""

    asked: tuple[int, ...]
    """Peers that asked to take part before it."""
    round: Round
    """What the round was before anybody trained."""
    joined_params: Hash | None
    """Hash of the params that joining peers were given; null where none joined."""
    evidence: Evidence
    """What was sent and said in it."""
    decision: Decision
    """What it came to."""
    loss: float | None
    """Mean over peers, at the params before the round, nats per token; null where none trained."""
    held_out_loss: float | None
    """After the round; null where it was not measured."""
