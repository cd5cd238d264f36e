"""Rounds on the simulated clock: what `train` follows and the auditor follows again.

Nobody fails here but by being late. Everything in a `Round` is a pure function of the run's
settings, its seed, the step and the data index; a `Decision` is one of the round, the arrivals and
the commitments. So whoever has those computes the same, and compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.errors import LockstepError
from pipeline.swarm import committee, coordinator, merkle
from pipeline.swarm.committee import Committee
from pipeline.swarm.coordinator import Join, RunState, Settings, State, Tick, WarmupWitness, Witness


@dataclass(frozen=True)
class Round:
    """One round, before anybody has trained.

    Attributes:
      step: The round, counted from 1.
      epoch: Its epoch, from 0.
      seed: The round's seed, u64.
      data_index: First sequence of the batch.
      batch_size: Sequences in the batch.
      assignment: Each trainer's first and last sequence, both included; a peer without is absent.
      witnesses: The elected witnesses.
    """

    step: int
    epoch: int
    seed: int
    data_index: int
    batch_size: int
    assignment: dict[int, tuple[int, int]]
    witnesses: tuple[int, ...]


@dataclass(frozen=True)
class Attestation:
    """One witness's word on what it received.

    Attributes:
      witness: The witness.
      received: The peers whose messages it holds, ascending.
      root: Merkle root over their commitments in that order, hex.
    """

    witness: int
    received: tuple[int, ...]
    root: str


@dataclass(frozen=True)
class Decision:
    """What a round came to.

    Attributes:
      applied: Peers whose messages everybody applies: those that `quorum` witnesses received.
      late: Peers whose message came after max_round_train_time, or never.
      attestations: The witnesses' words, by witness.
      quorum: Witnesses needed.
      train_seconds: Simulated seconds from the round's start until all witnesses could speak.
      now: The simulated clock when the round was over, seconds from the start of the run.
    """

    applied: tuple[int, ...]
    late: tuple[int, ...]
    attestations: tuple[Attestation, ...]
    quorum: int
    train_seconds: float
    now: float


@dataclass(frozen=True)
class Progress:
    """Where a run is: the coordinator's state and the seed that all rounds' seeds come from."""

    state: State
    seed: int

    @property
    def now(self) -> float:
        """The simulated clock, seconds; it only moves from one transition to the next."""
        return self.state.since

    def to_json(self) -> dict:
        """Return the progress without the run's settings, as `json.dumps` takes it."""
        return {"seed": self.seed, "state": self.state.to_json()}

    @classmethod
    def from_json(cls, data: dict, settings: Settings) -> "Progress":
        """Return the progress that `to_json` wrote."""
        return cls(state=State.from_json(data["state"], settings), seed=data["seed"])


def start(
    settings: Settings,
    count: int,
    seed: int,
    max_seq_len: int,
    start_step: int = 0,
    start_data_index: int = 0,
) -> Progress:
    """Return a run that peers 0..`count`-1 have just joined, at time 0.

    Args:
      settings: The run's `[config]`.
      count: How many peers take part.
      seed: The run's seed.
      max_seq_len: Tokens in a sequence, for the batch ramp.
      start_step: Rounds trained already, where the run extends an earlier one.
      start_data_index: Sequences that those took.

    Raises:
      LockstepError: Such a run could not train a round.
    """
    if not settings.init_min_clients <= count <= coordinator.MAX_PEERS:
        raise LockstepError(
            f"[peers] count = {count}, expected {settings.init_min_clients} "
            f"([config] init_min_clients) to {coordinator.MAX_PEERS}"
        )
    if settings.verification_percent:
        raise LockstepError(
            f"[config] verification_percent = {settings.verification_percent}, expected 0: "
            "no peer verifies during training yet, the witness stage does afterwards"
        )
    if start_step >= settings.total_steps:
        raise LockstepError(
            f"[config] total_steps = {settings.total_steps}, expected more than the {start_step} "
            "steps that the earlier run trained"
        )
    state = coordinator.start(
        settings, max_seq_len, step=start_step + 1, data_index=start_data_index
    )
    for peer in range(count):
        state = coordinator.tick(state, Join(peer))
    return Progress(state=state, seed=seed)


def next_round(progress: Progress) -> tuple[Progress, Round | None]:
    """Return the run at its next round, and that round, or None when the run has finished.

    Asked again before the round is finished, it gives the same round: a run may stop and go on.

    Raises:
      CoordinatorError: The run is paused, or too few of its peers are left.
    """
    while progress.state.run_state != RunState.RoundTrain:
        if progress.state.run_state == RunState.Finished:
            return progress, None
        progress = _advance(progress)
    return progress, _round(progress.state)


def finish_round(
    progress: Progress,
    round: Round,
    arrivals: Mapping[int, float],
    commitments: Mapping[int, bytes],
) -> tuple[Progress, Decision]:
    """Return the run after `round`, and what was decided.

    A witness speaks as soon as it holds every message, so that the round ends early; if one is
    missing at max_round_train_time it attests to the others. Then round_witness_time passes.

    Args:
      progress: The run, as `next_round` returned it.
      round: The round, as `next_round` returned it.
      arrivals: Seconds after the round's start at which a peer's message is at the witnesses; a
        peer that sent nothing is absent.
      commitments: The commitment of each peer in `arrivals`.

    Raises:
      ValueError: The round is not the one in progress, or the messages are not its trainers'.
    """
    state = progress.state
    if state.run_state != RunState.RoundTrain or round != _round(state):
        raise ValueError(
            f"round {round.step} is not in progress: {state.run_state.name} at step {state.step}"
        )
    if arrivals.keys() != commitments.keys() or not arrivals.keys() <= round.assignment.keys():
        raise ValueError(
            f"round {round.step}: arrivals of peers {sorted(arrivals)} and commitments of peers "
            f"{sorted(commitments)}, expected the same, all among {sorted(round.assignment)}"
        )

    limit = state.settings.max_round_train_time
    received = tuple(peer for peer in arrivals if arrivals[peer] <= limit)
    late = tuple(peer for peer in sorted(round.assignment) if peer not in received)
    train_seconds = float(limit if late else max(arrivals.values()))
    if late:
        state = coordinator.tick(state, Tick(state.deadline, round.seed))
    spoke = state.since if late else state.since + train_seconds
    attestations = tuple(attest(witness, received, commitments) for witness in round.witnesses)
    for attestation in attestations:
        state = coordinator.tick(state, Witness(attestation.witness, spoke))

    progress = _advance(replace(progress, state=state))
    quorum = committee.witness_quorum(len(round.witnesses))
    decision = Decision(
        applied=agreed(attestations, quorum),
        late=late,
        attestations=attestations,
        quorum=quorum,
        train_seconds=train_seconds,
        now=progress.now,
    )
    return progress, decision


def attest(
    witness: int, received: tuple[int, ...], commitments: Mapping[int, bytes]
) -> Attestation:
    """Return a witness's word on the commitments it received."""
    received = tuple(sorted(received))
    root = merkle.root([commitments[peer] for peer in received])
    return Attestation(witness=witness, received=received, root=root.hex())


def agreed(attestations: tuple[Attestation, ...], quorum: int) -> tuple[int, ...]:
    """Return the peers, ascending, whose messages at least `quorum` witnesses received."""
    words = [peer for attestation in attestations for peer in attestation.received]
    return tuple(peer for peer in sorted(set(words)) if words.count(peer) >= quorum)


def _round(state: State) -> Round:
    """Return the round that a state in RoundTrain is in."""
    peers = tuple(record.peer for record in state.peers)
    seats = committee.committees(
        state.seed,
        len(peers),
        verification_percent=state.settings.verification_percent,
        tie_breakers=0,
    )
    trainers = [peer for peer, seat in zip(peers, seats, strict=True) if seat == Committee.Trainer]
    return Round(
        step=state.step,
        epoch=state.epoch,
        seed=state.seed,
        data_index=state.data_index,
        batch_size=state.batch_size,
        assignment=committee.assign(trainers, state.seed, state.data_index, state.batch_size),
        witnesses=state.witnesses,
    )


def _advance(progress: Progress) -> Progress:
    """Move on to the next transition, at the time at which it is due."""
    state = progress.state
    begins = state.step + (state.run_state == RunState.RoundWitness)  # the round that may begin
    seed = committee.round_seed(progress.seed, begins)
    if state.run_state == RunState.Warmup:
        # These peers hold the params already, so warmup_time is no more than a bound.
        after = state
        for witness in state.witnesses:
            after = coordinator.tick(after, WarmupWitness(witness, state.since, seed))
    else:
        now = state.since if state.deadline is None else state.deadline
        after = coordinator.tick(state, Tick(now, seed))
    if after == state:
        raise coordinator.CoordinatorError(state, "the clock", "waits for members who never come")
    return replace(progress, state=after)
