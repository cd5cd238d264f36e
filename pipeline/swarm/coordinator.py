"""The coordinator: a run's state machine, as one pure function `tick(state, event) -> state`.

It imports no JAX, reads no clock and does no I/O. States, their numbers and their transitions are
Psyche's, except where Psyche loses work:

    | Psyche                                       | here                                        |
    |----------------------------------------------|---------------------------------------------|
    | total_steps = N trains N - 1 rounds          | trains N rounds                             |
    | a timed-out epoch ends two rounds late, and  | an epoch ends at the first round boundary   |
    |   those two train nothing: two batches lost  |   after its time; every round trains        |
    | a round's results are applied two rounds     | applied at the end of the same round: no    |
    |   later, so other ends of an epoch lose two  |   end of an epoch loses any                 |
    | with witness_nodes = 0 the quorum is a share | the quorum is a share of the witnesses that |
    |   of those who spoke, which always suffices  |   were elected                              |
    | an epoch lasts epoch_time                    | epoch_time, or rounds_per_epoch as in older |
    |                                              |   Psyche: exactly one of them               |
    | too few peers are noticed after a round has  | noticed first: Warmup goes straight back    |
    |   been started on them                       |   to WaitingForMembers                      |
    | a timeout needs a later whole second, so a   | a duration of 0 takes no time               |
    |   duration of 0 still takes one              |                                             |
    | members ask to join again for each epoch     | healthy members stay until they leave       |
    | Warmup elects its witnesses with seed 0      | with the seed of the tick that began it     |
"""

import enum
from dataclasses import dataclass, fields, replace
from typing import Protocol

from pipeline.swarm import committee

MAX_PEERS = 256


class RunState(enum.IntEnum):
    """Where a run is, as Psyche names and numbers it."""

    Uninitialized = 0
    WaitingForMembers = 1
    Warmup = 2
    RoundTrain = 3
    RoundWitness = 4
    Cooldown = 5
    Finished = 6
    Paused = 7


class ClientState(enum.IntEnum):
    """What became of a peer in this epoch, as Psyche names and numbers it."""

    Healthy = 0
    Dropped = 1
    Withdrawn = 2
    Ejected = 3


HALTED = (RunState.Uninitialized, RunState.Finished, RunState.Paused)
ACTIVE = (RunState.RoundTrain, RunState.RoundWitness, RunState.Cooldown)


class CoordinatorError(ValueError):
    """An event that the run's state does not allow."""

    def __init__(self, state: "State", event: object, reason: str):
        super().__init__(f"{event} in {state.run_state.name} at step {state.step}: {reason}")


class Settings(Protocol):
    """What the coordinator reads of a run's `[config]`: times in seconds, counts of peers."""

    init_min_clients: int
    min_clients: int
    witness_nodes: int
    verification_percent: int
    total_steps: int
    waiting_for_members_extra_time: float
    warmup_time: float
    max_round_train_time: float
    round_witness_time: float
    cooldown_time: float
    epoch_time: float | None
    rounds_per_epoch: int | None

    def batch_size(self, tokens: int) -> int:
        """Return the sequences in a batch that begins after `tokens` tokens."""


# ---- events ----


@dataclass(frozen=True)
class Tick:
    """Time passed; `random_seed` is used if a warm-up or a round begins."""

    now: float
    random_seed: int


@dataclass(frozen=True)
class Join:
    """A peer asks to take part from the next epoch on."""

    peer: int


@dataclass(frozen=True)
class WarmupWitness:
    """An elected witness says that every peer has the params; `random_seed` as in `Tick`."""

    peer: int
    now: float
    random_seed: int


@dataclass(frozen=True)
class Witness:
    """An elected witness says what it received in this round."""

    peer: int
    now: float


@dataclass(frozen=True)
class Pause:
    """The owner stops the run: at the end of the epoch's cooldown, or at once before training."""

    now: float


@dataclass(frozen=True)
class Resume:
    """The owner lets a paused run go on."""

    now: float


Event = Tick | Join | WarmupWitness | Witness | Pause | Resume


# ---- state ----


@dataclass(frozen=True)
class PeerRecord:
    """A member of the current epoch."""

    peer: int
    state: ClientState


@dataclass(frozen=True)
class State:
    """A run, between two events.

    Attributes:
      settings: The run's `[config]`; not part of the JSON form.
      max_seq_len: Tokens in a sequence.
      run_state: Where the run is.
      since: When it got there, seconds.
      step: The round being trained, or the next one; the first is 1.
      epoch: The epoch, from 0.
      data_index: First sequence of this round's batch, or of the next round's.
      height: Rounds finished in this epoch.
      epoch_start: When this epoch's warm-up began, seconds.
      epoch_start_step: `step` when it began.
      cold_start: This epoch is the first after a pause.
      pending_pause: Pause when this epoch has cooled down.
      seed: Seed of this warm-up or round.
      spoken: Witnesses of this warm-up or round that have spoken, in order.
      peers: The epoch's members, whose places are the indices that elections are about.
      exited: Members that left in this epoch.
      pending: Peers that take part from the next epoch on, in the order they came.
    """

    settings: Settings
    max_seq_len: int
    run_state: RunState
    since: float
    step: int
    epoch: int
    data_index: int
    height: int
    epoch_start: float
    epoch_start_step: int
    cold_start: bool
    pending_pause: bool
    seed: int
    spoken: tuple[int, ...]
    peers: tuple[PeerRecord, ...]
    exited: tuple[PeerRecord, ...]
    pending: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        """Sequences in the batch at `data_index`, from the ramp."""
        return self.settings.batch_size(self.data_index * self.max_seq_len)

    @property
    def witnesses(self) -> tuple[int, ...]:
        """The elected witnesses of this warm-up or round."""
        elected = committee.witnesses(self.seed, len(self.peers), self.settings.witness_nodes)
        return tuple(self.peers[index].peer for index in elected)

    @property
    def deadline(self) -> float | None:
        """When `run_state` times out, seconds; None where no time ends it."""
        durations = {
            RunState.WaitingForMembers: self.settings.waiting_for_members_extra_time,
            RunState.Warmup: self.settings.warmup_time,
            RunState.RoundTrain: self.settings.max_round_train_time,
            RunState.RoundWitness: self.settings.round_witness_time,
            RunState.Cooldown: self.settings.cooldown_time,
        }
        return self.since + durations[self.run_state] if self.run_state in durations else None

    def cold_start_bounds(self, warmup_steps: int) -> tuple[int, int] | None:
        """Return the first and last step of the learning rate's ramp after a pause, if in one."""
        first = self.epoch_start_step
        return (first, first + warmup_steps) if self.cold_start else None

    def to_json(self) -> dict:
        """Return the state without its settings, as `json.dumps` takes it."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        records = {
            name: [[record.peer, record.state.name] for record in data[name]]
            for name in ("peers", "exited")
        }
        lists = {name: list(data[name]) for name in ("spoken", "pending")}
        return data | records | lists | {"run_state": self.run_state.name}

    @classmethod
    def from_json(cls, data: dict, settings: Settings) -> "State":
        """Return the state that `to_json` wrote."""
        records = {
            name: tuple(PeerRecord(peer, ClientState[state]) for peer, state in data[name])
            for name in ("peers", "exited")
        }
        tuples = {name: tuple(data[name]) for name in ("spoken", "pending")}
        run_state = {"run_state": RunState[data["run_state"]]}
        return cls(settings=settings, **(data | records | tuples | run_state))


# ---- transitions ----


def start(settings: Settings, max_seq_len: int, *, step: int, data_index: int) -> State:
    """Return a run without members at time 0, about to train round `step` from `data_index` on."""
    return State(
        settings=settings,
        max_seq_len=max_seq_len,
        run_state=RunState.WaitingForMembers,
        since=0.0,
        step=step,
        epoch=0,
        data_index=data_index,
        height=0,
        epoch_start=0.0,
        epoch_start_step=step,
        cold_start=False,
        pending_pause=False,
        seed=0,
        spoken=(),
        peers=(),
        exited=(),
        pending=(),
    )


def tick(state: State, event: Event) -> State:
    """Return the state after `event`: at most one transition, or `state` itself when none is due.

    Raises:
      CoordinatorError: The event is not allowed in this state.
    """
    if not isinstance(event, Join) and event.now < state.since:
        raise CoordinatorError(state, event, f"this state began at {state.since}")
    match event:
        case Tick():
            return _tick(state, event)
        case Join(peer):
            return _join(state, event, peer)
        case WarmupWitness():
            state = _speak(state, event, (RunState.Warmup,))
            all_spoke = len(state.spoken) == len(state.witnesses)
            return _finish_warmup(state, event.now, event.random_seed) if all_spoke else state
        case Witness():
            state = _speak(state, event, (RunState.RoundTrain, RunState.RoundWitness))
            all_spoke = len(state.spoken) == len(state.witnesses)
            if all_spoke and state.run_state == RunState.RoundTrain:
                return _enter(state, RunState.RoundWitness, event.now)
            return state
        case Pause(now):
            if state.run_state in HALTED:
                raise CoordinatorError(state, event, "the run is halted already")
            if state.run_state in ACTIVE:
                return replace(state, pending_pause=True)
            return _pause(state, now)
        case Resume(now):
            if state.run_state != RunState.Paused:
                raise CoordinatorError(state, event, "the run is not paused")
            return _wait_or_finish(state, now)


def _tick(state: State, event: Tick) -> State:
    if state.run_state in HALTED:
        raise CoordinatorError(state, event, "the run is halted")
    now, timed_out = event.now, event.now >= state.deadline
    match state.run_state:
        case RunState.WaitingForMembers:
            enough = len(state.pending) >= state.settings.init_min_clients
            return _start_epoch(state, now, event.random_seed) if enough and timed_out else state
        case RunState.Warmup:
            too_few = len(_let_go(state).peers) < state.settings.min_clients
            return _finish_warmup(state, now, event.random_seed) if timed_out or too_few else state
        case RunState.RoundTrain:
            return _enter(state, RunState.RoundWitness, now) if timed_out else state
        case RunState.RoundWitness:
            return _finish_round(state, now, event.random_seed) if timed_out else state
        case RunState.Cooldown:
            return _finish_epoch(state, now) if timed_out else state


def _join(state: State, event: Join, peer: int) -> State:
    if state.run_state in (RunState.Uninitialized, RunState.Finished):
        raise CoordinatorError(state, event, "the run takes no members")
    if peer in state.pending or PeerRecord(peer, ClientState.Healthy) in state.peers:
        raise CoordinatorError(state, event, "the peer is a member already")
    return replace(state, pending=(*state.pending, peer))


def _speak(state: State, event: WarmupWitness | Witness, allowed: tuple[RunState, ...]) -> State:
    if state.run_state not in allowed:
        expected = " or ".join(run_state.name for run_state in allowed)
        raise CoordinatorError(state, event, f"expected {expected}")
    if event.peer not in state.witnesses:
        raise CoordinatorError(state, event, f"the witnesses are {state.witnesses}")
    if event.peer in state.spoken:
        raise CoordinatorError(state, event, "the witness has spoken already")
    return replace(state, spoken=(*state.spoken, event.peer))


def _start_epoch(state: State, now: float, seed: int) -> State:
    members, pending = state.pending[:MAX_PEERS], state.pending[MAX_PEERS:]
    return replace(
        _enter(state, RunState.Warmup, now),
        height=0,
        epoch_start=now,
        epoch_start_step=state.step,
        seed=seed,
        spoken=(),
        peers=tuple(PeerRecord(peer, ClientState.Healthy) for peer in members),
        exited=(),
        pending=pending,
    )


def _finish_warmup(state: State, now: float, seed: int) -> State:
    state = _let_go(state)  # only now, so that the places of its witnesses stay while it lasts
    if len(state.peers) < state.settings.min_clients:
        return _wait_or_finish(state, now)
    return _start_round(state, now, seed)


def _start_round(state: State, now: float, seed: int) -> State:
    return replace(_enter(state, RunState.RoundTrain, now), seed=seed, spoken=())


def _finish_round(state: State, now: float, seed: int) -> State:
    spoken = len(state.spoken)
    quorum = committee.witness_quorum(len(state.witnesses))
    state = replace(
        _let_go(state),
        step=state.step + 1,
        height=state.height + 1,
        data_index=state.data_index + state.batch_size,
    )
    if spoken == 0:  # nobody is there any more
        return _enter(_withdraw_all(state), RunState.Cooldown, now)
    if (
        _epoch_is_over(state, now)
        or spoken < quorum
        or len(state.peers) < state.settings.min_clients
        or state.step > state.settings.total_steps
        or state.pending_pause
    ):
        return _enter(state, RunState.Cooldown, now)
    return _start_round(state, now, seed)


def _epoch_is_over(state: State, now: float) -> bool:
    if state.settings.rounds_per_epoch is not None:
        return state.height >= state.settings.rounds_per_epoch
    return now >= state.epoch_start + state.settings.epoch_time


def _finish_epoch(state: State, now: float) -> State:
    state = replace(_let_go(state), epoch=state.epoch + 1)
    if state.pending_pause:
        return _pause(state, now)
    return _wait_or_finish(replace(state, cold_start=False), now)


def _pause(state: State, now: float) -> State:
    state = replace(_withdraw_all(state), cold_start=True, pending_pause=False)
    return _enter(state, RunState.Paused, now)


def _wait_or_finish(state: State, now: float) -> State:
    if state.step > state.settings.total_steps:
        return _enter(state, RunState.Finished, now)
    members = tuple(record.peer for record in state.peers)
    state = replace(state, peers=(), pending=members + state.pending)
    return _enter(state, RunState.WaitingForMembers, now)


def _let_go(state: State) -> State:
    """Move the members that are not healthy out of the epoch."""
    gone = tuple(record for record in state.peers if record.state != ClientState.Healthy)
    stay = tuple(record for record in state.peers if record.state == ClientState.Healthy)
    return replace(state, peers=stay, exited=state.exited + gone) if gone else state


def _withdraw_all(state: State) -> State:
    gone = tuple(PeerRecord(record.peer, ClientState.Withdrawn) for record in state.peers)
    return replace(state, peers=(), exited=state.exited + gone)


def _enter(state: State, run_state: RunState, now: float) -> State:
    return replace(state, run_state=run_state, since=now)
