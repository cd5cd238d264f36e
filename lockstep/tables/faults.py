"""The faults that a run file can schedule: their kinds, and the table that schedules one.

A row of `KINDS` has all that validation needs. What is sent in place of the truth is in
`swarm/lies.py`, and when, in `swarm/faults.py`.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field, model_validator

from lockstep.tables.peers import PeersTable
from lockstep.tables.table import AsTuple, Count, Distinct, Positive, Table, one_or_list, wrong


class Rounds(Protocol):
    """What of `[config]` bounds the faults of a run."""

    init_min_clients: int
    total_steps: int
    verification_percent: int


class FaultyRun(NamedTuple):
    """What of a run decides which kinds of faults it can have.

    Attributes:
      sends, is_signs, kept: As its method has them (`OptimizerVariant`).
      called: What errors call a key of a run file.
    """

    peers: PeersTable
    config: Rounds
    sends: str
    is_signs: bool
    kept: int
    called: Callable[[str], str]


def _others(run: FaultyRun) -> str | None:
    expected = "a kind for a lone peer: this one involves others"
    return expected if run.peers.count < 2 else None


def _values(run: FaultyRun) -> str | None:
    expected = "a kind for signs, or quantize_1bit = false, since signs have no size"
    return expected if run.is_signs else None


def _positions(run: FaultyRun) -> str | None:
    expected = "a kind for messages of whole arrays, whose elements no peer chooses"
    return _others(run) or (expected if run.sends == "arrays" else None)


def _plain(run: FaultyRun) -> str | None:
    if not run.kept:
        return "a kind for gradients, which have no indices"
    if run.peers.wire != "psyche":
        text = '"psyche" with it, since compressed indices cannot repeat'
        return f"{run.called('peers.wire')} = {text}"
    expected = "at least 2 coefficients per block, so that one can be sent twice"
    return expected if run.kept < 2 else None


def _programs(run: FaultyRun) -> str | None:
    if run.peers.layout != "each":
        text = '"each" with it, so that one peer can run another program'
        return f"{run.called('peers.layout')} = {text}"
    text = '"matmul" with it, since cuDNN computes in bfloat16 only'
    return f"{run.called('peers.attention')} = {text}" if run.peers.attention == "cudnn" else None


def _rules(run: FaultyRun) -> str | None:
    expected = f'{run.called("peers.bits")} = "everywhere" with it, whose products are ours to flip'
    return _programs(run) or (None if run.peers.bits == "everywhere" else expected)


def _verifiers(run: FaultyRun) -> str | None:
    expected = f"{run.called('config.verification_percent')} above 0 with it, so that peers verify"
    return _others(run) or (None if run.config.verification_percent else expected)


NEEDS: dict[str, Callable[[FaultyRun], str | None]] = {
    "": lambda run: None,
    "others": _others,
    "values": _values,
    "positions": _positions,
    "plain": _plain,
    "programs": _programs,
    "rules": _rules,
    "verifiers": _verifiers,
}
"""What kinds of faults need of a run, each with what is expected where it is missing.

Other peers; messages with values that have a size; and other peers and messages with positions that
each peer chooses; positions that are plain on the wire; a program for each peer; also one by rules;
verifiers.
"""


class FaultKind(NamedTuple):
    """One kind of fault."""

    # what it replaces: a message, its bytes, a peer's work or program, the clock, a witness's
    # attestation, or a verifier's check
    wraps: Literal["message", "bytes", "work", "program", "clock", "attestation", "check"]
    size: float | None  # default of a fault's `size`, or None for a kind without a size
    needs: str  # of `NEEDS`
    does: str  # what the peer does, and what size means; completes "the peer ..."

    def misfit(self, run: FaultyRun) -> str | None:
        """Return what is expected in place of such a fault where a run cannot have it."""
        return NEEDS[self.needs](run)


KINDS: dict[str, FaultKind] = {
    # ---- another message than its own, of the right form ----
    "free_rider": FaultKind("message", None, "", "sends zeros, at the first indices"),
    "copycat": FaultKind("message", None, "others", "sends the next peer's message as its own"),
    "stale": FaultKind(
        "message", 4.0, "", "sends its own message from size rounds before, or from its first round"
    ),
    "sign_flip": FaultKind("message", None, "", "sends its message negated"),
    "scale_up": FaultKind("message", 10.0, "values", "multiplies its values by size"),
    "scale_down": FaultKind("message", 0.1, "values", "multiplies its values by size"),
    "noise": FaultKind(
        "message",
        1.0,
        "",
        "adds normal noise of size times the values' RMS or, in messages of signs, flips each sign "
        "with probability min(1, size) / 2",
    ),
    "opposite": FaultKind(
        "message", None, "others", "sends the negated mean of the others' messages"
    ),
    "little_enough": FaultKind(
        "message",
        1.0,
        "others",
        "sends the mean of the others' messages minus size standard deviations",
    ),
    "drift": FaultKind(
        "message",
        0.01,
        "",
        "shifts its values by size times their RMS, in the same direction every round or, in "
        "messages of signs, flips one sign",
    ),
    "collude": FaultKind(
        "message", None, "", "sends, with its group, the negated message of the group's first peer"
    ),
    "lone_index": FaultKind(
        "message",
        None,
        "positions",
        "sends elements that no other peer sends, the same ones in each round where it can, each "
        "pushed in one direction",
    ),
    "forged": FaultKind(
        "message", None, "", "sends random indices, and signs or values of the true RMS"
    ),
    # ---- bytes that are not a message, or not the one committed to ----
    "malformed": FaultKind("bytes", None, "", "sends only the first half of its bytes"),
    "not_finite": FaultKind("bytes", None, "values", "sends NaN and infinity among its values"),
    "duplicated": FaultKind("bytes", None, "plain", "sends an index of a block twice"),
    "wrong_hash": FaultKind("bytes", None, "", "commits to its message but sends another"),
    "equivocation": FaultKind(
        "bytes",
        None,
        "others",
        "sends half of the peers a different message with its own commitment",
    ),
    # ---- other work than was assigned ----
    "lazy": FaultKind(
        "work", 0.5, "", "trains on only the fraction size of its sequences, at least one"
    ),
    "wrong_data": FaultKind("work", None, "", "trains on sequences that were not assigned to it"),
    "wrong_precision": FaultKind(
        "program", None, "programs", "computes in bfloat16 instead of float32, or the reverse"
    ),
    "bit_flip": FaultKind(
        "program",
        1.0,
        "rules",
        "flips a bit of one element of the size-th product of matrices of its gradient",
    ),
    # ---- the clock ----
    "dropped": FaultKind("clock", None, "", "trains, but its message never arrives"),
    "late": FaultKind("clock", 3600.0, "", "sends its message size seconds late"),
    "crash": FaultKind(
        "clock", None, "", "is offline, loses its state, and then asks to join again"
    ),
    "join": FaultKind(
        "clock", None, "", "is offline from the start of the run, and then asks to join"
    ),
    # ---- its reports about others ----
    "false_witness": FaultKind(
        "attestation", None, "", "attests, as a witness, messages that it did not receive"
    ),
    "denying_witness": FaultKind(
        "attestation", None, "", "denies, as a witness, messages that it received"
    ),
    "false_verifier": FaultKind(
        "check", None, "verifiers", "accuses, as a verifier, an honest peer"
    ),
}

FaultName = Literal[tuple(KINDS)]
PeerNumber = Annotated[int, Field(ge=0)]
SomePeers = Annotated[tuple[PeerNumber, ...], Field(min_length=1), Distinct, AsTuple]


class Fault(Table):
    """One kind of fault, committed by one or several peers for some rounds."""

    kind: Annotated[
        FaultName,
        Field(
            description="Kind of the fault, by what the peer does. "
            + ". ".join(f"{name}: it {kind.does}" for name, kind in KINDS.items())
            + "."
        ),
    ]
    peer: one_or_list(PeerNumber, SomePeers)
    """The faulty peer, or a list of them; the first peer is 0."""
    rounds: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2), AsTuple]
    """First and last round of the fault, inclusive; the first round of a run is 1."""
    size: Positive | None = None
    """Strength of the fault. Meaning and default depend on `kind`; some kinds have none."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The peers that commit the fault."""
        return (self.peer,) if isinstance(self.peer, int) else self.peer

    @property
    def strength(self) -> float | None:
        """The fault's `size`, or the default of its kind; None for a kind without a size."""
        return KINDS[self.kind].size if self.size is None else self.size

    @property
    def changes_only_message(self) -> bool:
        """Whether the fault changes the one message that the peer sends, and nothing else."""
        return KINDS[self.kind].wraps in ("message", "bytes") and self.kind != "equivocation"

    @model_validator(mode="after")
    def _first_is_first(self) -> "Fault":
        first, last = self.rounds
        if first > last:
            raise wrong("rounds", "[first, last] with first <= last")
        if self.kind == "join" and first != 1:
            raise wrong("rounds", "[1, last], since a joining peer is offline from the start")
        return self

    @model_validator(mode="after")
    def _kind_can_be_done(self) -> "Fault":
        if self.size is not None and KINDS[self.kind].size is None:
            raise wrong("size", f"none, since {self.kind} has no size")
        if self.kind == "bit_flip" and self.strength % 1:
            raise wrong("size", "a whole number, by which products are counted from 1")
        if self.kind == "lazy" and self.strength >= 1:
            raise wrong("size", "less than 1, a fraction of the sequences")
        if self.kind == "collude" and len(self.peers) < 2:
            raise wrong("peer", "a list of at least 2 peers, which send the same message")
        return self


Schedule = Annotated[tuple[Fault, ...], AsTuple]
