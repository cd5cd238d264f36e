"""Rounds on the simulated clock: what `train` follows and the auditor follows again.

A `Round` is a pure function of the run's settings, its seed and what happened before; a `Decision`
is one of the round and of what was said in it (`Evidence`). So whoever has those computes the
same, and compares.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import LockstepError
from pipeline.protocol import committee, coordinator
from pipeline.protocol.bloom import Bloom
from pipeline.protocol.consensus import in_time, judge
from pipeline.protocol.coordinator import (
    ClientState,
    CoordinatorError,
    Eject,
    HealthCheck,
    Join,
    RunState,
    Settings,
    State,
    Tick,
    Untrained,
    WarmupWitness,
    Witness,
    participant,
)
from pipeline.protocol.round import Decision, Evidence, Round


@dataclass(frozen=True)
class RunProgress:
    """Where a run is.

    Attributes:
      state: The coordinator's state.
      seed: What all rounds' seeds come from.
      load_seconds: What it costs each peer to fetch the params when it joins.
      begun: Whether a round has been given out.
      fresh: Peers that joined since, and have taken part in no round yet.
    """

    state: State
    seed: int
    load_seconds: tuple[float, ...]
    begun: bool = False
    fresh: tuple[int, ...] = ()

    @property
    def now(self) -> float:
        """The simulated clock, seconds; it only moves from one transition to the next."""
        return self.state.since

    @property
    def unready(self) -> tuple[int, ...]:
        """Members that could not fetch the params within the warm-up."""
        limit = self.state.settings.warmup_time
        return tuple(peer for peer in self.joining if self.load_seconds[peer] > limit)

    @property
    def joining(self) -> tuple[int, ...]:
        """Members whose first round this is, or will be."""
        members = {record.peer for record in self.state.peers}
        return tuple(peer for peer in self.fresh if peer in members)

    def to_json(self) -> dict:
        """Return the progress without the run's settings, as `json.dumps` takes it."""
        lists = {"load_seconds": list(self.load_seconds), "fresh": list(self.fresh)}
        return {"seed": self.seed, "begun": self.begun, "state": self.state.to_json()} | lists

    @classmethod
    def from_json(cls, data: dict, settings: Settings) -> "RunProgress":
        """Return the progress that `to_json` wrote."""
        return cls(
            state=State.from_json(data["state"], settings),
            seed=data["seed"],
            load_seconds=tuple(data["load_seconds"]),
            begun=data["begun"],
            fresh=tuple(data["fresh"]),
        )


def start(
    settings: Settings,
    count: int,
    seed: int,
    max_seq_len: int,
    start_step: int = 0,
    start_data_index: int = 0,
    load_seconds: Sequence[float] | None = None,
) -> RunProgress:
    """Return a run at time 0 that nobody has joined.

    Args:
      settings: The run's `[config]`.
      count: How many peers may take part.
      seed: The run's seed.
      max_seq_len: Tokens in a sequence, for the batch ramp.
      start_step: Rounds trained already, where the run extends an earlier one.
      start_data_index: Sequences that those took.
      load_seconds: What fetching the params costs each peer; absent is nothing.

    Raises:
      LockstepError: Such a run could not train a round.
    """
    if not settings.init_min_clients <= count <= coordinator.MAX_PEERS:
        raise LockstepError(
            f"[peers] count = {count}, expected {settings.init_min_clients} "
            f"([config] init_min_clients) to {coordinator.MAX_PEERS}"
        )
    if start_step >= settings.total_steps:
        raise LockstepError(
            f"[config] total_steps = {settings.total_steps}, expected more than the {start_step} "
            "steps that the earlier run trained"
        )
    state = coordinator.start(
        settings, max_seq_len, step=start_step + 1, data_index=start_data_index
    )
    return RunProgress(state, seed, tuple(load_seconds or (0.0,) * count))


def ask(progress: RunProgress, peers: Iterable[int]) -> RunProgress:
    """Return the run after `peers` asked to take part.

    Who asks before the first round begins with it, and has the run's params and a state already.
    Who asks later takes part from the next epoch on.

    Raises:
      CoordinatorError: The run does not have such a peer, or does not take it.
    """
    peers, state, count = tuple(peers), progress.state, len(progress.load_seconds)
    for peer in peers:
        if not 0 <= peer < count:
            raise CoordinatorError(state, Join(peer), f"expected one of its {count} peers")
        state = coordinator.tick(state, Join(peer))
    fresh = progress.fresh if not progress.begun else (*progress.fresh, *peers)
    return replace(progress, state=state, fresh=fresh)


def may_ask(progress: RunProgress, peer: int) -> bool:
    """Return whether a peer has not asked yet, is out of the epoch, and has not been ejected."""
    state = progress.state
    here = {record.peer for record in state.peers if record.state == ClientState.Healthy}
    return peer not in {*here, *state.pending, *state.ejected}


def next_round(progress: RunProgress) -> tuple[RunProgress, Round | None]:
    """Return the run at its next round, and that round, or None when the run has finished.

    Asked again before the round is finished, it gives the same round: a run may stop and go on.

    Raises:
      CoordinatorError: The run is paused, or too few of its peers are left.
    """
    while progress.state.run_state != RunState.RoundTrain:
        if progress.state.run_state == RunState.Finished:
            return progress, None
        progress = _advance(progress)
    return replace(progress, begun=True), _round(progress)


def finish_round(
    progress: RunProgress, round_: Round, evidence: Evidence
) -> tuple[RunProgress, Decision]:
    """Return the run after `round`, and what was decided.

    A witness speaks as soon as it holds every message, so that the round ends early; if one is
    missing at max_round_train_time it attests to the others. Then round_witness_time passes, or
    longer while a dispute is settled.

    Who is proven to lie is out of the run (`consensus.judge`). The sequences of every
    message that is not applied are given out again.

    Raises:
      ValueError: The round is not the one in progress, or the messages are not its trainers'.
    """
    state = progress.state
    if state.run_state != RunState.RoundTrain or round_ != _round(progress):
        raise ValueError(
            f"round {round_.step} is not in progress: {state.run_state.name} at step {state.step}"
        )
    _check(round_, evidence)
    limit = state.settings.max_round_train_time
    arrived = in_time(evidence.arrivals, limit)
    late = tuple(peer for peer in sorted(round_.assignment) if peer not in arrived)
    times = [*evidence.arrivals.values(), *(check.seconds for check in evidence.checks)]
    waited = bool(late or evidence.silent or max(times) > limit)
    train_seconds = float(limit if waited else max(times))

    if waited:
        state = coordinator.tick(state, Tick(state.deadline, round_.seed))
    spoke = state.since if waited else state.since + train_seconds
    for word in evidence.attestations:
        state = coordinator.tick(state, Witness(word.witness, spoke, word.heard(round_.seed)))

    quorum = committee.witness_quorum(len(round_.witnesses))
    applied, ejected = judge(round_, evidence, limit, quorum)
    for peer in ejected:
        state = coordinator.tick(state, Eject(peer, spoke))
    dropped = _unheard(state, evidence.silent, quorum)
    if dropped:
        speaker = evidence.attestations[0].witness
        state = coordinator.tick(state, HealthCheck(speaker, dropped, spoke))
    left = tuple(span for peer, span in sorted(round_.assignment.items()) if peer not in applied)
    if left:
        state = coordinator.tick(state, Untrained(left, spoke))

    fresh = tuple(peer for peer in progress.fresh if peer not in round_.joined)
    progress = replace(progress, state=state, fresh=fresh)
    progress = _advance(progress, spoke + evidence.settle_seconds)
    return progress, Decision(
        applied=applied,
        late=late,
        dropped=dropped,
        ejected=ejected,
        quorum=quorum,
        train_seconds=train_seconds,
        now=progress.now,
    )


def _check(round_: Round, evidence: Evidence) -> None:
    senders = evidence.messages.keys()
    if not evidence.arrivals.keys() <= senders or not senders <= round_.assignment.keys():
        raise ValueError(
            f"round {round_.step}: arrivals of peers {sorted(evidence.arrivals)} and messages of "
            f"peers {sorted(senders)}, expected these all among {sorted(round_.assignment)}"
        )


def _unheard(state: State, silent: Iterable[int], quorum: int) -> tuple[int, ...]:
    """The members that so few witnesses heard from that they are gone."""
    if len(state.spoken) < quorum:
        return ()
    members = {r.peer for r in state.peers if r.state == ClientState.Healthy}
    return tuple(p for p in silent if p in members and not coordinator.healthy(state, p))


def _round(progress: RunProgress) -> Round:
    """Return the round that a run in RoundTrain is in."""
    state = progress.state
    plan = state.plan
    return Round(
        step=state.step,
        epoch=state.epoch,
        seed=state.seed,
        data_index=state.data_index,
        batch_size=sum(last - first + 1 for first, last in plan.spans.values()),
        peers=tuple(record.peer for record in state.peers),
        assignment=plan.spans,
        verifiers=committee.verified(
            state.seed, state.verifiers, [p for p in state.trainers if p in plan.spans]
        ),
        witnesses=state.witnesses,
        joined=progress.joining,
    )


def _advance(progress: RunProgress, not_before: float = 0.0) -> RunProgress:
    """Move on to the next transition, at the time at which it is due."""
    state = progress.state
    begins = state.step + (state.run_state == RunState.RoundWitness)  # the round that may begin
    seed = committee.round_seed(progress.seed, begins)
    now = max(state.since if state.deadline is None else state.deadline, not_before)
    if state.run_state == RunState.Warmup and not progress.unready:
        # Whoever was here already holds the params, so it ends when the last has fetched them.
        loaded = max([0.0, *(progress.load_seconds[peer] for peer in progress.joining)])
        after, heard = state, [participant(record.peer) for record in state.peers]
        for witness in state.witnesses:
            filter = Bloom.of(heard, f"lockstep/bloom:{state.seed}:{witness}:warmup".encode())
            said = WarmupWitness(witness, state.since + loaded, seed, filter)
            after = coordinator.tick(after, said)
    else:
        after = coordinator.tick(state, Tick(now, seed))
    if after == state:
        raise CoordinatorError(state, "the clock", "waits for members who never come")
    return replace(progress, state=after)
