"""Rounds on the simulated clock, for training and for an auditor who follows it again.

A `Round` is a pure function of the run's settings, its seed and the rounds before it; a `Decision`
is a pure function of the round and its `Evidence`. An auditor recomputes both and compares.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import LockstepError
from lockstep.protocol import committee, coordinator
from lockstep.protocol.closing import Closing, OnItsWay, age_of, sender
from lockstep.protocol.consensus import ElectedWitnesses, Reports, arrived, judge
from lockstep.protocol.round import Decision, Evidence, Round, Travelling
from lockstep.protocol.run_state import (
    MAX_PEERS,
    CoordinatorError,
    CoordinatorState,
    RunState,
    Settings,
)
from lockstep.protocol.sets import Bloom, participant
from lockstep.tables.links import Links


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The settings of a run by which the driver takes its rounds."""

    coordinator: Settings  #: `[config]`, as the coordinator reads it.
    links: Links  #: `[links]`.
    peers: int  #: How many may take part.
    seed: int  #: `[peers] seed`, from which the seeds of rounds derive.
    row_tokens: int  #: Tokens of a row, by which `[links]` and the batch ramp count.
    micro_batch: int  #: Rows of a gradient computation.
    closing: Closing  #: What a round waits for.
    reports: Reports = ElectedWitnesses()  #: Who says that it ended, and with which messages.
    stores_epochs: bool = False  #: Whether a peer stores the params that end an epoch.

    @property
    def trainers(self) -> int:
        """The number of peers that train in a round if all take part; the others verify."""
        return committee.trainers_of(self.peers, self.coordinator.verification_percent)


@dataclass(frozen=True)
class RunProgress:
    """Where a run is in its rounds, as the driver moves it on."""

    state: CoordinatorState  #: The coordinator's state.
    seed: int  #: The run's seed, from which the seeds of its rounds derive.
    #: Seconds that each peer needs to fetch the params when it joins.
    load_seconds: tuple[float, ...]
    started: bool = False  #: Whether the first round has started.
    #: Peers that joined since then and have not taken part in a round yet.
    fresh: tuple[int, ...] = ()
    left: tuple[int, ...] = ()  #: Peers that left and have not asked to take part again.
    #: Peers that have once withheld the state that a verifier needed.
    withheld: frozenset[int] = frozenset()
    stores_epochs: bool = False  #: Whether a member stores the params that end an epoch.

    @property
    def now(self) -> float:
        """The simulated clock of the run in seconds; it only moves at transitions."""
        return self.state.since

    @property
    def unready(self) -> tuple[int, ...]:
        """Members of the run that could not fetch the params within the warm-up."""
        limit = self.state.settings.warmup_time
        return tuple(peer for peer in self.joining if self.load_seconds[peer] > limit)

    @property
    def joining(self) -> tuple[int, ...]:
        """Members of the run whose first round this is, or will be."""
        members = {record.peer for record in self.state.peers}
        return tuple(peer for peer in self.fresh if peer in members)

    @property
    def waiting(self) -> bool:
        """Whether the run waits for members: more have to ask before its next round."""
        state = self.state
        minimum = state.settings.init_min_clients
        return state.run_state == RunState.WaitingForMembers and len(state.pending) < minimum

    @property
    def pausing(self) -> bool:
        """Whether the run cools down before a pause: it goes on once it is resumed."""
        return self.state.pending_pause and self.state.run_state == RunState.Cooldown


def start(
    settings: RoundSettings, step: int, data_index: int, loads: Sequence[float]
) -> RunProgress:
    """Return a run's progress at time 0, without members.

    A run that extends another starts after its `step` rounds and `data_index` sequences. `loads`,
    by peer, are the seconds that it takes to fetch the params.
    """
    config, count = settings.coordinator, settings.peers
    if not config.init_min_clients <= count <= MAX_PEERS:
        raise LockstepError(
            f"[peers] count = {count}, expected {config.init_min_clients} "
            f"([config] init_min_clients) to {MAX_PEERS}"
        )
    if step >= config.total_steps:
        raise LockstepError(
            f"[config] total_steps = {config.total_steps}, expected more than the {step} "
            "steps that the earlier run trained"
        )
    state = CoordinatorState(
        settings=config,
        max_seq_len=settings.row_tokens,
        closing=settings.closing,
        reports=settings.reports,
        step=step + 1,
        data_index=data_index,
    )
    loads, stores = tuple(loads), settings.stores_epochs
    return RunProgress(state, settings.seed, loads, stores_epochs=stores)


def ask(progress: RunProgress, peers: Iterable[int]) -> RunProgress:
    """Return the run's progress after `peers` asked to take part.

    A peer that asks before the first round takes part in it, with the run's params and a state. A
    peer that asks later takes part from the next epoch on.

    Raises:
      CoordinatorError: The peer does not exist, or the run does not accept it.
    """
    peers, state, count = tuple(peers), progress.state, len(progress.load_seconds)
    for peer in peers:
        if not 0 <= peer < count:
            raise CoordinatorError(
                state, coordinator.Join((peer,)), f"expected one of the run's {count} peers"
            )
    state = coordinator.tick(state, coordinator.Join(peers)) if peers else state
    fresh = (*progress.fresh, *peers) if progress.started else progress.fresh
    returning = set(peers)
    left = tuple(peer for peer in progress.left if peer not in returning)
    return replace(progress, state=state, fresh=tuple(dict.fromkeys(fresh)), left=left)


def may_ask(progress: RunProgress, peers: Iterable[int]) -> tuple[int, ...]:
    """Return those of `peers`, each once, that may ask to take part.

    They are not in the epoch, have not asked yet, and were not ejected.
    """
    state = progress.state
    excluded = state.healthy_members.union(state.pending, state.ejected)
    return tuple(peer for peer in dict.fromkeys(peers) if peer not in excluded)


def leave(progress: RunProgress, peers: Iterable[int]) -> RunProgress:
    """Return the run's progress after `peers` left it, in the round in progress.

    What a peer sent in the round still counts, and its seat stays until the round is over. A peer
    that has asked to take part, and does not yet, no longer waits for it.

    Raises:
      CoordinatorError: A peer neither takes part nor has asked to.
    """
    peers, state = tuple(peers), progress.state
    state = coordinator.tick(state, coordinator.Leave(peers, progress.now)) if peers else state
    return replace(progress, state=state, left=(*progress.left, *peers))


def pause(progress: RunProgress) -> RunProgress:
    """Return the run's progress after its owner paused it: the epoch ends with this round."""
    return replace(
        progress, state=coordinator.tick(progress.state, coordinator.Pause(progress.now))
    )


def resume(progress: RunProgress) -> RunProgress:
    """Return a run's progress that is `pausing` after it cooled down, paused and was resumed.

    Its members come back with their own states, so none of them is a newcomer. A pause takes no
    time on the simulated clock.
    """
    healthy = progress.state.healthy_members
    members = tuple(r.peer for r in progress.state.peers if r.peer in healthy)
    paused = _advance(progress)
    state = coordinator.tick(paused.state, coordinator.Resume(paused.now))
    if members and state.run_state != RunState.Finished:
        state = coordinator.tick(state, coordinator.Join(members))
    return replace(paused, state=state)


def checkpointer(progress: RunProgress) -> int | None:
    """Return the member that stores the params which end an epoch: the first.

    None within an epoch, and where nobody stores them.
    """
    state = progress.state
    if state.run_state != RunState.Cooldown or not progress.stores_epochs:
        return None
    return next((r.peer for r in state.peers if r.peer in state.healthy_members), None)


def checkpointed(progress: RunProgress, peer: int, params: str) -> RunProgress:
    """Return the run's progress after a member stored the params that ended its epoch.

    `params` is their SHA-256 in hex.

    Raises:
      CoordinatorError: The epoch goes on, the peer is not a member, or others were stored before.
    """
    event = coordinator.Checkpointed(peer, progress.now, params)
    return replace(progress, state=coordinator.tick(progress.state, event))


def next_round(progress: RunProgress) -> tuple[RunProgress, Round | None]:
    """Return the run at its next round, and that round; None when it has finished or is `waiting`.

    Calling it again before the round is finished returns the same round, so a run can be resumed.

    Raises:
      CoordinatorError: The run is paused.
    """
    while progress.state.run_state != RunState.RoundTrain:
        if progress.state.run_state == RunState.Finished or progress.waiting:
            return progress, None
        progress = _advance(progress)
    return replace(progress, started=True), _round(progress)


def finish_round(
    progress: RunProgress, round_: Round, evidence: Evidence
) -> tuple[RunProgress, Decision]:
    """Return the run's progress after a round, and the round's decision.

    A witness attests as soon as it holds every message, so the round may end early; if a message
    is missing when the round closes, it attests to the others. Then round_witness_time passes, or
    longer while steps are checked and disputes settled.

    Proven liars are ejected (`consensus.judge`), and so is a peer that withholds its state for the
    second time: the first time may be a crash. The sequences of every message that is neither
    applied nor merged later are assigned again.

    Raises:
      ValueError: The round is not the one in progress, or messages are not from its trainers.
    """
    state = progress.state
    _check(progress, round_, evidence)
    limit = state.closing.closes(round_, evidence)
    missing = round_.spans.keys() - set(arrived(round_, evidence, limit))
    times = [*evidence.arrivals.values(), *(m.seconds for m in round_.travelling.values())]
    last = max(times, default=math.inf)  # none if all travelling messages are of other fragments
    waited = bool(missing or evidence.silent or last > limit)
    train_seconds = float(limit if waited else last)

    now = state.since + train_seconds
    if waited:
        state = coordinator.tick(state, coordinator.Close(now))
    for witness, participants in state.reports.participants(round_, evidence):
        state = coordinator.tick(state, coordinator.WitnessReport(witness, now, participants))

    quorum = state.quorum
    # Health is judged after ejections, so that nobody is both a proven liar and merely silent.
    applied, ejected = judge(round_, evidence, limit, state.reports, quorum)
    repeated = progress.withheld.intersection(evidence.withheld)
    ejected = dict(sorted((dict.fromkeys(repeated, "no state") | ejected).items()))
    if ejected:
        state = coordinator.tick(state, coordinator.Eject(tuple(ejected), now))
    dropped = _unheard(state, evidence.silent, quorum)
    if dropped:
        state = coordinator.tick(state, coordinator.HealthCheck(state.spoken[0], dropped, now))
    travelling: set[int] = set()
    if len(state.spoken) >= quorum:
        slots = [slot for slot in missing if sender(slot) not in ejected]
        messages = _on_their_way(progress.state, round_, evidence, slots)
        travelling = set(map(state.slot_of, messages))
        if messages:
            state = coordinator.tick(state, coordinator.TravelOn(messages, now))
    untrained = round_.spans.keys() - set(applied) - travelling
    spans = tuple(round_.spans[slot] for slot in sorted(untrained))
    if spans:
        state = coordinator.tick(state, coordinator.Untrained(spans, now))

    joined = set(round_.joined)
    fresh = tuple(peer for peer in progress.fresh if peer not in joined)
    withheld = progress.withheld.union(evidence.withheld)
    progress = replace(progress, state=state, fresh=fresh, withheld=withheld)
    checking = max((min(check.seconds, limit) for check in evidence.checks), default=0.0)
    progress = _advance(progress, now + checking + evidence.settle_seconds)
    late = tuple(sorted(missing - travelling))
    return progress, Decision(
        applied=applied,
        late=late,
        dropped=dropped,
        ejected=ejected,
        quorum=quorum,
        train_seconds=train_seconds,
        now=progress.now,
        travelling=tuple(sorted(travelling)),
    )


def _on_their_way(
    state: CoordinatorState, round_: Round, evidence: Evidence, missing: Collection[int]
) -> tuple[OnItsWay, ...]:
    """Return the messages in `missing` slots that may be merged in a later round.

    Messages that never arrive, that receivers refuse, or that exist in two versions are left out.
    """
    travels_on, step = state.closing.travels_on, round_.step
    sent = evidence.arrivals.keys() - {*evidence.broken, *evidence.others}
    new = [
        OnItsWay(
            peer,
            step,
            round_.assignment[peer],
            evidence.messages[peer].commitment,
            state.since + evidence.arrivals[peer],
        )
        for peer in sorted(sent.intersection(missing))
        if travels_on(step, 0)
    ]
    older = [
        message
        for message in state.due
        if (slot := state.slot_of(message)) in missing and travels_on(step, age_of(slot))
    ]
    return *older, *new


def _check(progress: RunProgress, round_: Round, evidence: Evidence) -> None:
    state = progress.state
    if state.run_state != RunState.RoundTrain or round_ != _round(progress):
        raise ValueError(
            f"round {round_.step} is not in progress: {state.run_state.name} at step {state.step}"
        )
    senders = evidence.messages.keys()
    if not evidence.arrivals.keys() <= senders or not senders <= round_.assignment.keys():
        raise ValueError(
            f"round {round_.step}: arrivals of peers {sorted(evidence.arrivals)} and messages of "
            f"peers {sorted(senders)}, expected these all among {sorted(round_.assignment)}"
        )


def _unheard(state: CoordinatorState, silent: Iterable[int], quorum: int) -> tuple[int, ...]:
    """Return the round's silent members that no quorum heard from; none without a quorum."""
    members = [peer for peer in silent if peer in state.healthy_members]
    if not members or len(state.spoken) < quorum:
        return ()
    healthy = coordinator.healthy(state, members)
    return tuple(p for p, is_healthy in zip(members, healthy, strict=True) if not is_healthy)


def _round(progress: RunProgress) -> Round:
    """Return the driven run's round in progress, in RoundTrain."""
    state = progress.state
    plan, members = state.plan, tuple(record.peer for record in state.peers)
    return Round(
        step=state.step,
        epoch=state.epoch,
        seed=state.seed,
        data_index=state.data_index,
        batch_size=sum(last - first + 1 for first, last in plan.spans.values()),
        peers=members,
        assignment=plan.spans,
        verifiers=state.verifiers,
        witnesses=tuple(peer for peer in state.witnesses if peer in members),
        joined=progress.joining,
        travelling={
            state.slot_of(m): Travelling(
                m.step, m.span, m.commitment, seconds=max(0.0, m.at - state.since)
            )
            for m in state.due
        },
    )


def _advance(progress: RunProgress, not_before: float = 0.0) -> RunProgress:
    """Move the run to its next transition on the simulated clock, at the time it is due."""
    state = progress.state
    step = state.step + (state.run_state == RunState.RoundWitness)  # the round that may begin
    seed = committee.round_seed(progress.seed, step)
    now = max(state.since if state.deadline is None else state.deadline, not_before)
    if state.run_state == RunState.Warmup and not progress.unready:
        # Members that stayed hold the params, so the warm-up ends with the last newcomer's fetch.
        loaded = max([0.0, *(progress.load_seconds[peer] for peer in progress.joining)])
        next_state, heard = state, [participant(record.peer) for record in state.peers]
        for witness in state.witnesses:
            bloom = Bloom.of(heard, f"lockstep/bloom:{state.seed}:{witness}:warmup".encode())
            event = coordinator.WarmupWitness(witness, state.since + loaded, seed, bloom)
            next_state = coordinator.tick(next_state, event)
    else:
        next_state = coordinator.tick(state, coordinator.Tick(now, seed))
    if next_state == state:
        raise CoordinatorError(state, "the clock", "waits for members that never come")
    return replace(progress, state=next_state)
