"""A run of peers 0, 1 and 2 in any state, for the tests of the coordinator."""

from dataclasses import dataclass, replace

from lockstep.protocol import sets
from lockstep.protocol.closing import Closing
from lockstep.protocol.consensus import ElectedWitnesses
from lockstep.protocol.coordinator import ClientState, CoordinatorState, PeerRecord, RunState
from lockstep.protocol.sets import Bloom


@dataclass(frozen=True)
class Settings:
    """A run of 3 peers: seconds 10 waiting, 20 warm-up, 30 train, 2 witness, 5 cooldown."""

    init_min_clients: int = 3
    min_clients: int = 2
    witness_nodes: int = 2
    verification_percent: int = 0
    total_steps: int = 100
    waiting_for_members_extra_time: float = 10
    warmup_time: float = 20
    round_witness_time: float = 2
    cooldown_time: float = 5
    epoch_time: float | None = None
    rounds_per_epoch: int | None = 4

    def batch_size(self, tokens: int) -> int:
        return 8 if tokens < 1000 else 16  # a ramp in one step, at sequence 100 of 10 tokens


SEED = 12345
CLOSING = Closing(limit=30, most_rows=16)
HEALTHY, DROPPED = ClientState.Healthy, ClientState.Dropped
WITHDRAWN, EJECTED = ClientState.Withdrawn, ClientState.Ejected


def records(*peers: int, state: ClientState = HEALTHY) -> tuple[PeerRecord, ...]:
    return tuple(PeerRecord(peer, state) for peer in peers)


def heard(*peers: int) -> Bloom:
    """A witness's filter that holds `peers`."""
    return Bloom.of((sets.participant(peer) for peer in peers), b"seed")


def waiting(**changes) -> CoordinatorState:
    state = CoordinatorState(
        settings=Settings(),
        max_seq_len=10,
        closing=CLOSING,
        reports=ElectedWitnesses(),
        step=1,
        data_index=0,
    )
    return replace(state, **({"pending": (0, 1, 2)} | changes))


def at(run_state: RunState, **changes) -> CoordinatorState:
    """A state that began at second 100, in an epoch that began at 50, about peers 0, 1 and 2."""
    start = {"run_state": run_state, "since": 100, "epoch_start": 50, "pending": ()}
    return waiting(**(start | {"peers": records(0, 1, 2), "seed": SEED} | changes))


FIRST, SECOND = at(RunState.RoundTrain).witnesses
OTHER = ({0, 1, 2} - {FIRST, SECOND}).pop()
BOTH = (FIRST, SECOND)
ALL = heard(0, 1, 2)
SPANS = at(RunState.RoundTrain).plan.spans
EVERYONE = Settings(witness_nodes=0)  # three witnesses, of whom two are the quorum
