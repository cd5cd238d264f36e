"""The coordinator's events; `coordinator.tick` says what follows from each."""

from dataclasses import dataclass, field

from lockstep.protocol.bloom import Bloom
from lockstep.protocol.committee import Span
from lockstep.protocol.pace import OnItsWay


@dataclass(frozen=True)
class Tick:
    """Time passed; `random_seed` seeds the warm-up or round that may begin."""

    now: float
    random_seed: int


@dataclass(frozen=True)
class Join:
    """Peers ask to take part from the next epoch on."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class Leave:
    """Peers leave the epoch."""

    peers: tuple[int, ...]
    now: float


@dataclass(frozen=True)
class WarmupWitness:
    """An elected witness reports that every peer has the params; `random_seed` as in `Tick`.

    Its filter `participants` holds `bloom.participant` of every peer it heard from.
    """

    peer: int
    now: float
    random_seed: int
    participants: Bloom = field(repr=False)


@dataclass(frozen=True)
class WitnessReport:
    """An elected witness reports whom it heard from in this round, as in `WarmupWitness`."""

    peer: int
    now: float
    participants: Bloom = field(repr=False)


@dataclass(frozen=True)
class HealthCheck:
    """The witness `by` reports that `peers` are gone."""

    by: int
    peers: tuple[int, ...]
    now: float


@dataclass(frozen=True)
class Eject:
    """The others hold proof that peers lied."""

    peers: tuple[int, ...]
    now: float


@dataclass(frozen=True)
class Close:
    """The round waits for no further message."""

    now: float


@dataclass(frozen=True)
class TravelOn:
    """Messages of the round that may be merged in a later one; reported once a round."""

    messages: tuple[OnItsWay, ...]
    now: float


@dataclass(frozen=True)
class Untrained:
    """Spans of the round's messages, and of earlier ones, that nobody applies; once a round."""

    spans: tuple[Span, ...]
    now: float


@dataclass(frozen=True)
class Checkpointed:
    """A member has stored the epoch's last params; `params` is their SHA-256, hex."""

    peer: int
    now: float
    params: str


@dataclass(frozen=True)
class Pause:
    """The owner pauses the run: after the epoch's cooldown, or at once before training."""

    now: float


@dataclass(frozen=True)
class Resume:
    """The owner resumes a paused run."""

    now: float


Event = (
    Tick
    | Join
    | Leave
    | WarmupWitness
    | WitnessReport
    | HealthCheck
    | Eject
    | Close
    | TravelOn
    | Untrained
    | Checkpointed
    | Pause
    | Resume
)
