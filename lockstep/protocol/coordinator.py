"""The coordinator: a run's state machine, as one pure function `tick(state, event) -> state`.

It imports no JAX, reads no clock and does no I/O. States, their numbers and their transitions are
Psyche's, except where Psyche loses work:

    | Psyche                                       | here                                        |
    |----------------------------------------------|---------------------------------------------|
    | total_steps = N trains N - 1 rounds          | trains N rounds                             |
    | a timed-out epoch ends two rounds late, and  | an epoch ends at the first round boundary   |
    |   those two train nothing: two batches lost  |   after its time; every round trains        |
    | a round's results are applied two rounds     | applied at the end of the same round: no    |
    |   later, so an epoch's end loses two         |   epoch's end loses any                     |
    | with witness_nodes = 0 the quorum is a share | the quorum is a share of the witnesses that |
    |   of those who spoke, which always suffices  |   were elected                              |
    | an epoch lasts epoch_time                    | epoch_time, or rounds_per_epoch as in older |
    |                                              |   Psyche: exactly one of them               |
    | a shortage of peers is noticed only after a  | noticed first: Warmup goes straight back    |
    |   round has started                          |   to WaitingForMembers                      |
    | a timeout needs a later whole second, so a   | a duration of 0 takes no time               |
    |   duration of 0 still takes one              |                                             |
    | members ask to join again for each epoch     | healthy members stay until they leave       |
    | Warmup elects its witnesses with seed 0      | with the seed of the tick that began it     |
    | a health check concerns the previous round;  | the warm-up or round in progress; an        |
    |   anybody may send it                        |   elected witness sends it                  |
    | Ejected is never set                         | set by `Eject`; the peer stays out for good |
    | a batch whose message nobody applied is lost | reassigned, ahead of new sequences          |
    | the last of several checkpoints counts       | the first counts; another one is refused    |
    | a pause makes all members Withdrawn          | the Healthy ones                            |
    | a round waits for all witnesses, or its time | or for as much as its `Closing` says        |
    | peers attest to what they received           | over a store, which all see, nobody need    |
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.protocol.closing import OnItsWay
from lockstep.protocol.committee import Span
from lockstep.protocol.run_state import (
    ACTIVE,
    HALTED,
    MAX_PEERS,
    ClientState,
    CoordinatorError,
    CoordinatorState,
    PeerRecord,
    RunState,
)
from lockstep.protocol.sets import Bloom, ExactSet, participant

# ---- events ----


class Tick(NamedTuple):
    """Event of the coordinator: time passed; `random_seed` seeds what may begin then."""

    now: float
    random_seed: int


class Join(NamedTuple):
    """Event of the coordinator: peers ask to take part from the next epoch on."""

    peers: tuple[int, ...]


class Leave(NamedTuple):
    """Event of the coordinator: peers leave the epoch."""

    peers: tuple[int, ...]
    now: float


class WarmupWitness(NamedTuple):
    """Event of the coordinator: a witness says that all have params; `random_seed` as in `Tick`.

    Its filter `participants` holds `sets.participant` of every peer it heard from.
    """

    peer: int
    now: float
    random_seed: int
    participants: Bloom


class WitnessReport(NamedTuple):
    """Event of the coordinator: a witness says whom it heard from, as in `WarmupWitness`."""

    peer: int
    now: float
    participants: Bloom | ExactSet


class HealthCheck(NamedTuple):
    """Event of the coordinator: the witness `by` reports that `peers` are gone."""

    by: int
    peers: tuple[int, ...]
    now: float


class Eject(NamedTuple):
    """Event of the coordinator: the others hold proof that peers lied."""

    peers: tuple[int, ...]
    now: float


class Close(NamedTuple):
    """Event of the coordinator: the round waits for no further message."""

    now: float


class TravelOn(NamedTuple):
    """Event of the coordinator, once a round: messages of it that may be merged in a later one."""

    messages: tuple[OnItsWay, ...]
    now: float


class Untrained(NamedTuple):
    """Event of the coordinator, once a round: spans, of earlier rounds too, that nobody applies."""

    spans: tuple[Span, ...]
    now: float


class Checkpointed(NamedTuple):
    """Event of the coordinator: a member stored the epoch's last `params`, their SHA-256 in hex."""

    peer: int
    now: float
    params: str


class Pause(NamedTuple):
    """Event of the coordinator: the owner pauses, after the epoch's cooldown or before training."""

    now: float


class Resume(NamedTuple):
    """Event of the coordinator: the owner resumes a paused run."""

    now: float


Report = WarmupWitness | WitnessReport | HealthCheck | Eject | TravelOn | Untrained | Checkpointed
Event = Tick | Join | Leave | Close | Pause | Resume | Report


# ---- a run and its next state ----


def healthy(state: CoordinatorState, peers: Sequence[int]) -> list[bool]:
    """Return for each peer whether a quorum of this warm-up's or round's witnesses heard from it.

    Filters have false positives, so a peer that is gone may pass for healthy, never the reverse.
    """
    items = [participant(peer) for peer in peers]
    heard = [bloom.holds(items) for bloom in state.participants]
    return [sum(held[i] for held in heard) >= state.quorum for i in range(len(items))]


def tick(state: CoordinatorState, event: Event) -> CoordinatorState:
    """Return the coordinator's state after `event`: one transition at most, or `state` itself.

    Raises:
      CoordinatorError: The event is not allowed in this state.
    """
    if not isinstance(event, Join) and event.now < state.since:
        raise CoordinatorError(state, event, f"this state began at {state.since}")
    take, allowed = _ON[type(event)]
    if state.run_state not in allowed:
        expected = " or ".join(run_state.name for run_state in allowed)
        raise CoordinatorError(state, event, f"expected {expected}")
    return take(state, event)


# ---- time ----


def _on_tick(state: CoordinatorState, event: Tick) -> CoordinatorState:
    if state.deadline is None:
        raise CoordinatorError(state, event, "the run is halted")
    now, timed_out = event.now, event.now >= state.deadline
    if state.run_state == RunState.Warmup:  # too few members end it at once, as it cannot succeed
        timed_out |= len(_let_go(state).peers) < state.settings.min_clients
    if state.run_state == RunState.WaitingForMembers:
        timed_out &= len(state.pending) >= state.settings.init_min_clients
    if not timed_out:
        return state
    match state.run_state:
        case RunState.WaitingForMembers:
            return _start_epoch(state, now, event.random_seed)
        case RunState.Warmup:
            return _finish_warmup(state, now, event.random_seed)
        case RunState.RoundTrain:
            return _enter(state, RunState.RoundWitness, now)
        case RunState.RoundWitness:
            return _finish_round(state, now, event.random_seed)
        case _:
            return _finish_epoch(state, now)


# ---- messages of peers ----


def _on_join(state: CoordinatorState, event: Join) -> CoordinatorState:
    if state.run_state in (RunState.Uninitialized, RunState.Finished):
        raise CoordinatorError(state, event, "the run takes no members")
    ejected, members = set(state.ejected), {*state.pending, *state.healthy_members}
    for peer in event.peers:
        if peer in ejected:
            raise CoordinatorError(state, event, f"peer {peer} was ejected")
        if peer in members:
            raise CoordinatorError(state, event, f"peer {peer} is a member already")
        members.add(peer)
    return replace(state, pending=state.pending + event.peers)


def _on_leave(state: CoordinatorState, event: Leave) -> CoordinatorState:
    pending, members = set(state.pending), set(state.healthy_members)
    for peer in event.peers:
        if not (peer in pending or peer in members):
            raise CoordinatorError(state, event, f"peer {peer} is not a member")
        (pending if peer in pending else members).remove(peer)
    state = replace(state, pending=tuple(peer for peer in state.pending if peer in pending))
    return _mark(state, state.healthy_members - members, ClientState.Withdrawn)


def _on_warmup_witness(state: CoordinatorState, event: WarmupWitness) -> CoordinatorState:
    state = _speak(state, event)
    return _finish_warmup(state, event.now, event.random_seed) if _all_spoke(state) else state


def _on_witness(state: CoordinatorState, event: WitnessReport) -> CoordinatorState:
    state = _speak(state, event)
    if _all_spoke(state) and state.run_state == RunState.RoundTrain:
        return _enter(state, RunState.RoundWitness, event.now)
    return state


def _all_spoke(state: CoordinatorState) -> bool:
    return len(state.spoken) == len(state.witnesses)


def _speak(state: CoordinatorState, event: WarmupWitness | WitnessReport) -> CoordinatorState:
    _expect_witness(state, event, event.peer)
    if event.peer in state.spoken:
        raise CoordinatorError(state, event, "the witness has spoken already")
    return replace(
        state,
        spoken=(*state.spoken, event.peer),
        participants=(*state.participants, event.participants),
    )


def _on_health_check(state: CoordinatorState, event: HealthCheck) -> CoordinatorState:
    _expect_witness(state, event, event.by)
    if len(state.spoken) < state.quorum:
        reason = f"{len(state.spoken)} witnesses spoke, expected {state.quorum} to tell who is gone"
        raise CoordinatorError(state, event, reason)
    for peer, is_healthy in zip(event.peers, healthy(state, event.peers), strict=True):
        _expect_member(state, event, peer)
        if is_healthy:
            raise CoordinatorError(state, event, f"peer {peer} is healthy")
    return _mark(state, event.peers, ClientState.Dropped)


def _on_eject(state: CoordinatorState, event: Eject) -> CoordinatorState:
    members = {record.peer for record in state.peers} - set(state.ejected)
    for peer in event.peers:
        if peer not in members and (not state.reports.from_anybody or peer in state.ejected):
            raise CoordinatorError(state, event, f"peer {peer} is not a member")
        members.discard(peer)
    # A liar is ejected even if it has left or is silent, so that it cannot join again.
    state = _mark(state, event.peers, ClientState.Ejected)
    gone = set(event.peers)
    pending = tuple(peer for peer in state.pending if peer not in gone)
    return replace(state, ejected=state.ejected + event.peers, pending=pending)


def _on_close(state: CoordinatorState, event: Close) -> CoordinatorState:
    if state.closing.waits_for_all and event.now < state.since + state.closing.limit:
        raise CoordinatorError(state, event, "rounds of this run wait for all messages")
    return _enter(state, RunState.RoundWitness, event.now)


def _on_travel_on(state: CoordinatorState, event: TravelOn) -> CoordinatorState:
    if bad := [m for m in event.messages if state.spans.get(state.slot_of(m)) != m.span]:
        raise CoordinatorError(state, event, f"peer {bad[0].peer} has no such message")
    return replace(state, travel_on=event.messages)


def _on_untrained(state: CoordinatorState, event: Untrained) -> CoordinatorState:
    if state.missed is not None:
        raise CoordinatorError(state, event, "the round's untrained spans are known already")
    spans = set(state.spans.values())
    for span in event.spans:
        if span not in spans:
            reason = f"{span} is not one of the round's spans, or is there twice"
            raise CoordinatorError(state, event, reason)
        spans.remove(span)
    return replace(state, missed=event.spans)


def _on_checkpointed(state: CoordinatorState, event: Checkpointed) -> CoordinatorState:
    _expect_member(state, event, event.peer)
    if state.checkpoint is None:
        return replace(state, checkpoint=event.params, checkpointer=event.peer)
    if state.checkpoint != event.params:
        reason = f"peer {state.checkpointer} stored {state.checkpoint}"
        raise CoordinatorError(state, event, reason)
    return state


def _on_pause(state: CoordinatorState, event: Pause) -> CoordinatorState:
    if state.run_state in HALTED:
        raise CoordinatorError(state, event, "the run is halted already")
    if state.run_state in ACTIVE:
        return replace(state, pending_pause=True)
    return _pause(state, event.now)


def _on_resume(state: CoordinatorState, event: Resume) -> CoordinatorState:
    if state.run_state != RunState.Paused:
        raise CoordinatorError(state, event, "the run is not paused")
    return _wait_or_finish(state, event.now)


# What takes each event, and the states in which it may come; a handler has a reason of its own for
# those in which an event of ANY may not.
ANY, IN_ROUND = tuple(RunState), (RunState.RoundTrain, RunState.RoundWitness)
_ON: dict[type, tuple[Callable[[CoordinatorState, Any], CoordinatorState], tuple[RunState, ...]]]
_ON = {
    Tick: (_on_tick, ANY),
    Join: (_on_join, ANY),
    Leave: (_on_leave, ANY),
    WarmupWitness: (_on_warmup_witness, (RunState.Warmup,)),
    WitnessReport: (_on_witness, IN_ROUND),
    HealthCheck: (_on_health_check, (RunState.Warmup, RunState.RoundWitness)),
    Eject: (_on_eject, IN_ROUND),
    Close: (_on_close, (RunState.RoundTrain,)),
    TravelOn: (_on_travel_on, (RunState.RoundWitness,)),
    Untrained: (_on_untrained, (RunState.RoundWitness,)),
    Checkpointed: (_on_checkpointed, (RunState.Cooldown,)),
    Pause: (_on_pause, ANY),
    Resume: (_on_resume, ANY),
}


def _expect_witness(state: CoordinatorState, event: Event, peer: int) -> None:
    if peer not in state.witnesses:
        raise CoordinatorError(state, event, f"the witnesses are {state.witnesses}")


def _expect_member(state: CoordinatorState, event: Event, peer: int) -> None:
    if peer not in state.healthy_members:
        raise CoordinatorError(state, event, f"peer {peer} is not a member")


def _mark(state: CoordinatorState, peers: Iterable[int], status: ClientState) -> CoordinatorState:
    """Record in the state what became of `peers`; positions stay until the round is over."""
    marked = set(peers)
    records = (
        PeerRecord(record.peer, status) if record.peer in marked else record
        for record in state.peers
    )
    return replace(state, peers=tuple(records))


# ---- transitions ----


def _start_epoch(state: CoordinatorState, now: float, seed: int) -> CoordinatorState:
    members, pending = state.pending[:MAX_PEERS], state.pending[MAX_PEERS:]
    return replace(
        _enter(state, RunState.Warmup, now),
        height=0,
        epoch_start=now,
        seed=seed,
        spoken=(),
        participants=(),
        peers=tuple(PeerRecord(peer, ClientState.Healthy) for peer in members),
        exited=(),
        pending=pending,
        checkpoint=None,
        checkpointer=None,
    )


def _finish_warmup(state: CoordinatorState, now: float, seed: int) -> CoordinatorState:
    # Only now: elections are over positions in the list of members, which must not shift before.
    state = _let_go(state)
    if len(state.peers) < state.settings.min_clients:
        return _wait_or_finish(state, now)
    return _start_round(state, now, seed)


def _start_round(state: CoordinatorState, now: float, seed: int) -> CoordinatorState:
    started = _enter(state, RunState.RoundTrain, now)
    return replace(started, seed=seed, spoken=(), participants=(), missed=None, travel_on=())


def _finish_round(state: CoordinatorState, now: float, seed: int) -> CoordinatorState:
    # Read before members leave: seats, and so the plan, depend on the number of members.
    spoken, quorum, plan = len(state.spoken), state.quorum, state.plan
    # Without a quorum no message was applied, even if nobody is left to report it.
    missed = (state.missed or ()) if spoken >= quorum else tuple(sorted(state.spans.values()))
    state = replace(
        _let_go(state),
        step=state.step + 1,
        height=state.height + 1,
        data_index=state.data_index + plan.fresh,
        untrained=plan.waiting + missed,
        on_their_way=state.not_due + (state.travel_on if spoken >= quorum else ()),
    )
    if spoken == 0:  # nobody is left
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


def _epoch_is_over(state: CoordinatorState, now: float) -> bool:
    settings = state.settings
    if settings.rounds_per_epoch is not None:
        return state.height >= settings.rounds_per_epoch
    return settings.epoch_time is not None and now >= state.epoch_start + settings.epoch_time


def _finish_epoch(state: CoordinatorState, now: float) -> CoordinatorState:
    state = replace(_let_go(state), epoch=state.epoch + 1)
    if state.pending_pause:
        return _pause(state, now)
    return _wait_or_finish(state, now)


def _pause(state: CoordinatorState, now: float) -> CoordinatorState:
    state = replace(_withdraw_all(state), pending_pause=False)
    return _enter(state, RunState.Paused, now)


def _wait_or_finish(state: CoordinatorState, now: float) -> CoordinatorState:
    if state.step > state.settings.total_steps:
        return _enter(state, RunState.Finished, now)
    members = tuple(record.peer for record in state.peers)
    state = replace(state, peers=(), pending=members + state.pending)
    return _enter(state, RunState.WaitingForMembers, now)


def _let_go(state: CoordinatorState) -> CoordinatorState:
    """Move the members that are not healthy out of the coordinator's epoch."""
    gone = tuple(record for record in state.peers if record.state != ClientState.Healthy)
    members = tuple(record for record in state.peers if record.state == ClientState.Healthy)
    return replace(state, peers=members, exited=state.exited + gone) if gone else state


def _withdraw_all(state: CoordinatorState) -> CoordinatorState:
    state = _mark(state, state.healthy_members, ClientState.Withdrawn)
    return replace(state, peers=(), exited=state.exited + state.peers)


def _enter(state: CoordinatorState, run_state: RunState, now: float) -> CoordinatorState:
    return replace(state, run_state=run_state, since=now)
