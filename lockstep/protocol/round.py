"""The record of a round: `Round` before training, `Evidence` of what is sent, and `Decision`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import not_
from typing import Annotated

from pydantic import Field

from lockstep.protocol.attestation import Attestation, Check, Claim, Hash, Ruling
from lockstep.protocol.closing import sender
from lockstep.protocol.committee import Span
from lockstep.tables.table import NumberKey


@dataclass(frozen=True)
class Travelling:
    """A message of an earlier round that is merged in this one if it arrives in time."""

    step: int  #: The round in which it was computed.
    span: Span  #: First and last sequence that its peer was assigned in it.
    commitment: Hash  #: Commitment to the message, hex.
    #: When it is at every peer, in seconds after the round's start; 0 if it was before.
    seconds: float


@dataclass(frozen=True)
class Round:
    """One round, before anybody has trained."""

    step: int  #: The round, counted from 1.
    epoch: int  #: Its epoch, from 0.
    seed: int  #: The round's seed, u64.
    data_index: int  #: First new sequence of the batch.
    batch_size: int  #: Sequences in the batch, reassigned ones of earlier rounds included.
    peers: tuple[int, ...]  #: The epoch's members.
    #: Each trainer's first and last sequence, both inclusive; peers without work are absent.
    assignment: dict[NumberKey, Span]
    #: Peers that recompute others' steps instead of training. Whose steps is drawn when all have
    #: committed to their messages (`consensus.checked`).
    verifiers: tuple[int, ...]
    #: The elected witnesses; none over a store, which shows all peers the same.
    witnesses: tuple[int, ...]
    #: Peers that joined the running training and take part for the first time: they take over the
    #: others' params, and begin with a new state of their own.
    joined: tuple[int, ...]
    #: Messages of earlier rounds that are merged in this one if they arrive in time, by
    #: `slot`: 10,000 times the age, in versions of the fragment, and the peer.
    travelling: Annotated[dict[NumberKey, Travelling], Field(exclude_if=not_)] = field(
        default_factory=dict
    )

    @property
    def trainers(self) -> int:
        """Number of peers that train in the round."""
        return len(self.peers) - len(self.verifiers)

    @property
    def idle(self) -> frozenset[int]:
        """Members that have nothing to train on in the round."""
        return frozenset(self.peers).difference(self.assignment)

    @cached_property
    def spans(self) -> dict[int, Span]:
        """The sequences of each message that may be merged in the round, by its slot."""
        return {slot: message.span for slot, message in self.travelling.items()} | self.assignment

    @cached_property
    def sequences(self) -> dict[int, int]:
        """How many sequences each message that the round may merge was computed on."""
        return {slot: last - first + 1 for slot, (first, last) in self.spans.items()}

    def origin(self, slot: int) -> tuple[int, int]:
        """Return who computed the message in a slot of the round, and in which round."""
        step = self.travelling[slot].step if slot in self.travelling else self.step
        return sender(slot), step


def is_none(value: object) -> bool:
    """Return whether a round's field that an older release does not know is absent."""
    return value is None


@dataclass(frozen=True)
class Message:
    """What a peer sent in a round."""

    #: Commitment to the message, hex; empty where nobody reads it, never in a transcript.
    commitment: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    bytes: Annotated[int, Field(ge=0, lt=2**63)]  #: Size on the wire.
    #: Hash of the sender's own state after its step, hex; None if no peer verifies.
    state: Hash | None = None
    to: tuple[int, ...] = ()  #: Receivers of an equivocator's other message.
    #: Name of the file that keeps its bytes; None if they are not kept.
    payload: Annotated[str, Field(pattern=r"^([0-9]{5}|[1-9][0-9]{5,})\.bin$")] | None = None
    offset: Annotated[int, Field(ge=0)] | None = None  #: Where they begin in the file, bytes.
    #: Hash of what can change bits on its sender's machine, hex; None where the header says it.
    environment: Annotated[Hash | None, Field(exclude_if=is_none)] = None

    @property
    def claim(self) -> Claim:
        """The result that the sender claims for its step; used if peers verify."""
        return Claim(self.commitment, self.state or "")


@dataclass(frozen=True)
class Evidence:
    """The evidence of a round: what was sent and reported in it."""

    messages: dict[NumberKey, Message]  #: Each sender's message.
    others: dict[NumberKey, Message]  #: An equivocator's other message, by sender.
    #: When each peer's message is at every peer, in seconds after the round's start; a message that
    #: never arrives is absent.
    arrivals: dict[NumberKey, float]
    silent: tuple[int, ...]  #: Peers that nobody heard from.
    #: Senders whose bytes do not decode, or do not match their commitment, as every receiver can
    #: see.
    broken: tuple[int, ...]
    #: The witnesses' attestations; a silent witness is absent.
    attestations: tuple[Attestation, ...]
    checks: tuple[Check, ...]  #: What the verifiers found.
    rulings: tuple[Ruling, ...]  #: How their disputes were settled.
    settle_seconds: Annotated[float, Field(ge=0)]  #: Seconds that settling took.
    #: Peers that were to be checked, and did not show the state they had committed to.
    withheld: Annotated[tuple[int, ...], Field(exclude_if=not_)] = ()
    #: Over a store, who signed a link of its chain that does not follow from what the store shows.
    false_links: Annotated[tuple[int, ...], Field(exclude_if=not_)] = ()

    @property
    def commitments(self) -> dict[int, str]:
        """The commitment of each sender of the round, hex."""
        return {peer: message.commitment for peer, message in self.messages.items()}

    def present(self, peers: Iterable[int]) -> list[int]:
        """Return those of `peers` that somebody heard from in the round."""
        silent = set(self.silent)
        return [peer for peer in peers if peer not in silent]


@dataclass(frozen=True)
class Decision:
    """The decision on a round: its outcome."""

    #: Slots of messages that everybody applies; a message of the round is in its peer's. `quorum`
    #: witnesses hold the same one, nobody proved it false, and no check of it was prevented.
    applied: tuple[int, ...]
    #: Slots of messages that arrived after the round had closed, or never, and are not applied
    #: later either.
    late: tuple[int, ...]
    dropped: tuple[int, ...]  #: Peers that nobody heard from; they leave the epoch.
    ejected: dict[NumberKey, str]  #: Proven liars, and how they were caught; they leave for good.
    quorum: int  #: Number of witnesses needed.
    #: Simulated seconds from the round's start until all witnesses could attest.
    train_seconds: float
    now: float  #: Simulated clock at the end of the round, seconds since the start of the run.
    #: Slots of messages that had not arrived, and may be merged in a later round.
    travelling: Annotated[tuple[int, ...], Field(exclude_if=not_)] = ()


def commitments_of(round_: Round, evidence: Evidence) -> dict[int, str]:
    """Return the commitment of each message that a peer may hold in the round, by its slot."""
    earlier = {peer: late.commitment for peer, late in round_.travelling.items()}
    return earlier | {peer: message.commitment for peer, message in evidence.messages.items()}
