"""What people sign in a run: the lab the run and its slots, a volunteer what it sent and asks."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple
from parts.volunteers.keys import KEY
from parts.volunteers.layout import MOST_SLOTS
from parts.volunteers.signed import Body

KeyText = Annotated[str, Field(pattern=f"^{KEY.pattern}$")]
SlotNumber = Annotated[int, Field(ge=0, lt=MOST_SLOTS)]
RoundNumber = Annotated[int, Field(ge=0, lt=10**8)]
Int63 = Annotated[int, Field(ge=0, lt=2**63)]
LATEST = 2**33  # seconds since 1970, as a file's time can be
Seconds = Annotated[int, Field(ge=0, lt=LATEST)]
Loss = Annotated[float, Field(ge=-(2.0**128), le=2.0**128)]  # of 32 bits: any sum is finite
Reason = Annotated[str, Field(min_length=1, max_length=200)]


class RunDocument(Body):
    """run.json, by which everybody knows what the run is; the SHA-256 of its bytes is its name."""

    kind: ClassVar[str] = "run"
    format: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of what lies in the store."""
    release: Annotated[str, Field(min_length=1, max_length=64)]
    """Release of Lockstep that all of the run use."""
    run: dict[str, Any]
    """The run file's tables."""
    pins: dict[str, str]
    """What of the outside is read, by its hash."""
    start: Hash
    """Hash of params and shared state before the first round."""
    slots: Annotated[int, Field(ge=1, le=MOST_SLOTS)]
    """How many peers may take part at once."""
    payload_bytes: Annotated[int, Field(ge=1, le=2**28)]
    """The one length of a payload."""
    own_bytes: Annotated[int, Field(ge=0, lt=2**50)]
    """The one length of what a peer owns, as a file."""
    self_test: Hash | None
    """Hash of what a first step gives on every machine; null where machines may differ."""
    state_bytes: Annotated[int, Field(ge=0, lt=2**45)]
    """The one size of a file of params and shared state; 0 of a run whose states have none."""
    planted: Hash | None = None
    """SHA-256 of planted.json; null where the lab plants no lies."""
    lab: KeyText
    """Who admits, and signed this."""


class Admission(Body):
    """A signed body, peers/007/000.json: who has a slot from the next round on, until the next."""

    kind: ClassVar[str] = "admission"
    run: Hash
    """SHA-256 of run.json."""
    peer: SlotNumber
    """The slot."""
    number: Annotated[int, Field(ge=0, le=999)]
    """Which of the slot's statements this is."""
    key: KeyText | None
    """Who has it; null: nobody."""
    because: Reason | None = None
    """Why one was replaced or ended."""
    evidence: Annotated[tuple[str, ...], AsTuple, Field(max_length=64)] = ()
    """Names of what shows it, for anybody to compute again."""


class SlotBody(Body):
    """A signed body that a peer puts in a round: rounds/00000123/007.SLOT."""

    slot: ClassVar[str]
    run: Hash
    """SHA-256 of run.json."""
    round: RoundNumber
    """The round."""
    peer: SlotNumber
    """Who signs it."""

    @property
    def place(self) -> tuple[Hash, int, int]:
        """Run, round and peer, for whose slot alone the signed body is."""
        return self.run, self.round, self.peer


class MessageRecord(SlotBody):
    """A signed body, rounds/00000123/007.record: what a payload is the message of."""

    kind = slot = "record"
    span: Annotated[tuple[Int63, Int63], AsTuple]
    """First and last sequence that it was assigned."""
    base: Hash
    """Hash of the params before the round."""
    commitment: Hash
    """Commitment to the message."""
    bytes: Annotated[int, Field(ge=0, le=2**28)]
    """How many of the payload are the message; zeros follow them."""
    sha256: Hash
    """SHA-256 of the payload."""
    loss: Loss | None
    """Mean loss before the round, nats per token, which is stated and not checked."""
    environment: Hash
    """SHA-256 of what can change bits on this machine, in canonical JSON, as the join has it."""
    own: Hash | None = None
    """Hash of the peer's own state after the round, where a snapshot is."""


class JoinRequest(SlotBody):
    """A signed body, rounds/00000123/007.join: asks to take part."""

    kind = slot = "join"
    environment: Annotated[dict[str, str], Field(max_length=64)]
    """What can change bits on this machine."""
    self_test: Hash | None
    """Hash of what its step gave on the run's self-test; null where the run has none."""


class LeaveNotice(SlotBody):
    """A signed body, rounds/00000123/007.leave: takes no part from the next round on."""

    kind = slot = "leave"


class ShownState(SlotBody):
    """A signed body, rounds/00000123/007.shown: what its peer owned lies below `own/`."""

    kind = slot = "shown"
    index: Hash
    """SHA-256 of its index."""


class CollectedNotice(Body):
    """A signed body, collected/0000.json: the lab removed what is no longer needed."""

    kind: ClassVar[str] = "collected"
    run: Hash
    """SHA-256 of run.json."""
    number: Annotated[int, Field(ge=0, lt=10**4)]
    """Which of these notices it is."""
    round: RoundNumber
    """The last round of which payloads were removed."""
