"""A transcript's records: its header, and an entry for each round (docs/reference/transcript.md).

Strict, since a transcript may come from anyone.
"""

from operator import not_
from typing import Any

from pydantic import Field

from lockstep.protocol.attestation import Hash
from lockstep.protocol.round import Decision, Evidence, Round, is_none
from lockstep.tables.table import Table

FORMAT = 4
TABLES = {"config", "model", "peers", "links"}  # the run file's tables that Header.run holds


class Header(Table):
    """header.json."""

    format: int = FORMAT
    """Version of the format."""
    key: str
    """Key of the run's stage train."""
    run: dict[str, Any]
    """The run file's tables that determine the rounds."""
    model: dict[str, Any]
    """The model's config.json."""
    environment: dict[str, str]
    """Everything about the machine that can change bits."""
    bitwise: bool
    """Whether a peer's step, taken twice before training, gave the same bits."""
    held_out_loss: float | None
    """Held-out loss before the first round, nats per token; null where nothing is held out."""
    held_out_stderr: float | None = Field(default=None, exclude_if=is_none)
    """Its standard error; absent of a single row."""
    held_out_rows: tuple[int, int] | None = Field(default=None, exclude_if=is_none)
    """How many rows are measured, of how many of the split."""


class EpochParams(Table):
    """An entry's params that ended an epoch, once a member has stored them."""

    peer: int
    """The member."""
    params: Hash
    """Hash of the params."""


class Entry(Table):
    """An entry: a line of rounds.jsonl, one round.

    What release 0.1 does not know is absent where it is empty, so that it reads such rounds.
    """

    asked: tuple[int, ...]
    """Peers that asked to join before it."""
    left: tuple[int, ...] = Field(default=(), exclude_if=not_)
    """Peers that left in it, after what they sent."""
    paused: bool = Field(default=False, exclude_if=not_)
    """Whether the run's owner paused it in this round; the next is after it was resumed."""
    round: Round
    """The round before training."""
    joined_params: Hash | None
    """Hash of the params that joining peers received; null where no peer joined."""
    evidence: Evidence
    """What was sent and said in it."""
    decision: Decision
    """What it came to."""
    checkpointed: EpochParams | None = Field(default=None, exclude_if=not_)
    """The params after it, where it ended an epoch and the run has checkpointers."""
    loss: float | None
    """Mean loss of the peers before the round, nats per token; null where no peer trained."""
    held_out_loss: float | None
    """Held-out loss after the round; null where it was not measured."""
    held_out_stderr: float | None = Field(default=None, exclude_if=is_none)
    """Its standard error."""
