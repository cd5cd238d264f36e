"""What a transcript says: its header, and one entry for each round. Strict, since it is read from
whoever wrote it. Docs: docs/reference/transcript.md.
"""

from typing import Annotated, Any

from pydantic import Field

from pipeline.protocol.attestation import Attestation
from pipeline.protocol.dispute import Check, Hash, Ruling
from pipeline.protocol.round import Decision, Evidence, Round
from pipeline.runfile.table import Table

FORMAT = 1
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


class Message(Table):
    """What a peer sent in a round."""

    commitment: Hash
    """To what was sent, hex."""
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    """Its size on the wire."""
    state: Hash | None = None
    """Of the sender's own state after its step, hex; null where no peer verifies."""
    to: tuple[int, ...] = ()
    """Of an equivocator's other message: the peers that got this one."""
    payload: Annotated[str, Field(pattern=r"^[0-9]+\.bin$")] | None = None
    """The file that holds it; null where it is not kept."""
    offset: Annotated[int, Field(ge=0)] | None = None
    """Where in the file it begins."""


class Entry(Table):
    """A line of rounds.jsonl."""

    asked: tuple[int, ...]
    """Peers that asked to take part before it."""
    round: Round
    """Its number, seed, batch, assignment, verifiers and witnesses."""
    joined_params: Hash | None
    """Of the params that the peers which joined were given; null where none joined."""
    messages: dict[int, Message]
    """By peer."""
    others: dict[int, Message]
    """An equivocator's other message, by peer."""
    arrivals: dict[int, float]
    """By peer, simulated seconds from the round's start until its message is at every peer."""
    silent: tuple[int, ...]
    """Peers that nobody heard from."""
    broken: tuple[int, ...]
    """Senders whose bytes are no message, or not what they committed to."""
    attestations: tuple[Attestation, ...]
    """The witnesses' words."""
    checks: tuple[Check, ...]
    """The verifiers' words."""
    rulings: tuple[Ruling, ...]
    """The tie-breakers' words."""
    settle_seconds: Annotated[float, Field(ge=0)]
    """Simulated seconds that they took."""
    decision: Decision
    """What the coordinator made of it."""
    loss: float | None
    """Mean over peers, at the params before the round, nats per token; null where none trained."""
    held_out_loss: float | None
    """After the round; null where it was not measured."""

    @property
    def evidence(self) -> Evidence:
        """What was sent and said, as `finish_round` takes it."""
        return Evidence(
            arrivals=self.arrivals,
            commitments={p: bytes.fromhex(m.commitment) for p, m in self.messages.items()},
            others={p: bytes.fromhex(m.commitment) for p, m in self.others.items()},
            states={p: m.state for p, m in self.messages.items() if m.state is not None},
            broken=self.broken,
            silent=self.silent,
            attestations=self.attestations,
            checks=self.checks,
            rulings=self.rulings,
            settle_seconds=self.settle_seconds,
        )
