"""What a transcript says: its header, and one entry for each round. Strict, since it is read from
whoever wrote it. Docs: docs/transcript.md.
"""

from typing import Annotated, Any

from pydantic import Field

from pipeline.swarm.rounds import Decision, Round
from pipeline.table import Table

FORMAT = 1
TABLES = {"config", "model", "peers", "links"}  # of the run file, that Header.run holds


class Header(Table):
    """header.json."""

    format: int = FORMAT
    """Its version; see docs/transcript.md."""
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


class Message(Table):
    """What a peer sent in a round."""

    commitment: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """To what was sent, hex."""
    bytes: Annotated[int, Field(ge=0)]
    """Its size on the wire."""
    payload: Annotated[str, Field(pattern=r"^[0-9]+\.bin$")] | None = None
    """The file that holds it; null where it is not kept."""
    offset: Annotated[int, Field(ge=0)] | None = None
    """Where in the file it begins."""


class Entry(Table):
    """A line of rounds.jsonl."""

    round: Round
    """Its number, seed, batch, assignment and witnesses."""
    messages: dict[int, Message]
    """By peer."""
    arrivals: dict[int, float]
    """By peer, simulated seconds from the round's start until its message is at every peer."""
    decision: Decision
    """What the coordinator made of it."""
    loss: float
    """Mean over peers, at the params before the round, nats per token."""
    held_out_loss: float | None
    """After the round; null where it was not measured."""
