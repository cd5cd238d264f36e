"""The driver: exactly K rounds, every sequence once, late peers left out, and all of it in JSON."""

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.errors import LockstepError
from pipeline.swarm import committee, merkle, rounds
from pipeline.swarm.coordinator import CoordinatorError, Pause, RunState, tick
from pipeline.swarm.rounds import Attestation, Decision, Progress, Round


@dataclass(frozen=True)
class Settings:
    """Seconds 3 waiting, 20 warm-up, 30 train, 2 witness, 5 cooldown; 4 rounds an epoch."""

    init_min_clients: int = 4
    min_clients: int = 4
    witness_nodes: int = 3
    verification_percent: int = 0
    total_steps: int = 10
    waiting_for_members_extra_time: int = 3
    warmup_time: int = 20
    max_round_train_time: int = 30
    round_witness_time: int = 2
    cooldown_time: int = 5
    epoch_time: int | None = None
    rounds_per_epoch: int | None = 4
    batch: int = 8

    def batch_size(self, tokens: int) -> int:
        return self.batch if tokens < 10 * 40 else self.batch + 3


def commitment(round: Round, peer: int) -> bytes:
    return bytes([round.step, peer]) * 16


def train(progress: Progress, seconds: float = 1.0) -> tuple[list[Round], list[Decision], Progress]:
    """Everybody's messages arrive after `seconds`, until the run has finished."""
    trained, decided = [], []
    while True:
        progress, round = rounds.next_round(progress)
        if round is None:
            return trained, decided, progress
        arrivals = dict.fromkeys(round.assignment, seconds)
        commitments = {peer: commitment(round, peer) for peer in arrivals}
        progress, decision = rounds.finish_round(progress, round, arrivals, commitments)
        trained.append(round)
        decided.append(decision)


def test_total_steps_trains_exactly_that_many_rounds():
    trained, _, progress = train(rounds.start(Settings(), 4, 1, 10))
    assert [round.step for round in trained] == list(range(1, 11))
    assert [round.epoch for round in trained] == [0] * 4 + [1] * 4 + [2] * 2
    assert progress.state.run_state == RunState.Finished


def test_clock_adds_up_over_epochs():
    _, decided, progress = train(rounds.start(Settings(), 4, 1, 10), seconds=1.5)
    # Each epoch: 3 waiting, no warm-up, 3.5 a round, 5 cooling down.
    assert [decision.now for decision in decided[:5]] == [6.5, 10.0, 13.5, 17.0, 28.5]
    assert progress.now == 3 * 3 + 10 * 3.5 + 3 * 5
    assert {decision.train_seconds for decision in decided} == {1.5}


def test_epoch_by_time_ends_at_a_round_boundary_and_loses_no_batch():
    settings = Settings(epoch_time=60, rounds_per_epoch=None)
    trained, decided, _ = train(rounds.start(settings, 4, 1, 10), seconds=28)
    # 30 seconds a round: the second round of an epoch ends at 60, which is in time.
    assert [round.epoch for round in trained] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({decision.applied for decision in decided}) == 1


def test_round_is_a_pure_function_of_seed_step_and_data_index():
    whole, _, _ = train(rounds.start(Settings(), 4, 1, 10))
    again, _, _ = train(rounds.start(Settings(), 4, 1, 10), seconds=25)
    assert again == whole  # whatever the clock says
    sixth = whole[5]
    progress = rounds.start(Settings(), 4, 1, 10, start_step=5, start_data_index=sixth.data_index)
    _, extended = rounds.next_round(progress)
    assert extended == replace(sixth, epoch=0)
    assert extended.seed == committee.round_seed(1, 6)
    other, _, _ = train(rounds.start(Settings(), 4, 2, 10))
    assert all(a.seed != b.seed for a, b in zip(whole, other, strict=True))


def test_extended_run_trains_the_steps_that_are_left():
    trained, _, _ = train(rounds.start(Settings(), 4, 1, 10, start_step=7, start_data_index=56))
    assert [round.step for round in trained] == [8, 9, 10]
    assert trained[0].data_index == 56


def test_round_is_pinned():
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    assert round == Round(
        step=1,
        epoch=0,
        seed=17934626734559793897,
        data_index=0,
        batch_size=8,
        assignment={0: (6, 7), 1: (4, 5), 2: (0, 1), 3: (2, 3)},
        witnesses=(0, 2, 3),
    )
    assert progress.now == 3.0


def test_next_round_asked_again_gives_the_same_round():
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    assert rounds.next_round(progress) == (progress, round)


def test_run_stopped_between_any_two_calls_goes_on_from_json():
    settings = Settings()
    expected = train(rounds.start(settings, 4, 1, 10), seconds=0.1)

    def reread(progress: Progress) -> Progress:
        return Progress.from_json(json.loads(json.dumps(progress.to_json())), settings)

    progress, trained, decided = reread(rounds.start(settings, 4, 1, 10)), [], []
    while True:
        progress, round = rounds.next_round(progress)
        progress = reread(progress)
        if round is None:
            break
        arrivals = dict.fromkeys(round.assignment, 0.1)
        commitments = {peer: commitment(round, peer) for peer in arrivals}
        progress, decision = rounds.finish_round(progress, round, arrivals, commitments)
        progress = reread(progress)
        trained.append(round)
        decided.append(decision)
    assert (trained, decided, progress) == expected


def test_all_messages_in_time_are_all_applied_and_the_round_ends_early():
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    commitments = {peer: commitment(round, peer) for peer in range(4)}
    arrivals = {0: 4.0, 1: 30.0, 2: 0.5, 3: 7.0}  # the last moment is in time
    _, decision = rounds.finish_round(progress, round, arrivals, commitments)
    root = merkle.root([commitments[peer] for peer in range(4)]).hex()
    assert decision == Decision(
        applied=(0, 1, 2, 3),
        late=(),
        attestations=tuple(Attestation(w, (0, 1, 2, 3), root) for w in round.witnesses),
        quorum=2,
        train_seconds=30.0,
        now=3 + 30 + 2.0,
    )


@pytest.mark.parametrize("lateness", [30.001, float("inf"), float("nan"), None])
def test_late_or_missing_message_is_applied_by_nobody_and_costs_the_whole_time(lateness):
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    arrivals = {0: 1.0, 1: lateness, 2: 1.0, 3: 1.0}
    if lateness is None:
        del arrivals[1]
    commitments = {peer: commitment(round, peer) for peer in arrivals}
    progress, decision = rounds.finish_round(progress, round, arrivals, commitments)
    assert (decision.applied, decision.late) == ((0, 2, 3), (1,))
    assert (decision.train_seconds, decision.now) == (30.0, 35.0)
    root = merkle.root([commitments[peer] for peer in (0, 2, 3)]).hex()
    assert {attestation.root for attestation in decision.attestations} == {root}
    assert rounds.next_round(progress)[1].data_index == 8  # its batch is not given out again


def test_round_in_which_nothing_arrives_applies_nothing_and_goes_on():
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    progress, decision = rounds.finish_round(progress, round, {}, {})
    assert (decision.applied, decision.late) == ((), (0, 1, 2, 3))
    assert {attestation.root for attestation in decision.attestations} == {merkle.EMPTY.hex()}
    assert rounds.next_round(progress)[1].step == 2


def test_peer_without_sequences_is_waited_for_by_nobody():
    progress, round = rounds.next_round(rounds.start(Settings(batch=2), 4, 1, 10))
    assert len(round.assignment) == 2
    arrivals = dict.fromkeys(round.assignment, 1.0)
    commitments = {peer: commitment(round, peer) for peer in arrivals}
    _, decision = rounds.finish_round(progress, round, arrivals, commitments)
    assert (decision.applied, decision.late) == (tuple(sorted(round.assignment)), ())
    assert decision.train_seconds == 1.0


def test_decision_does_not_depend_on_the_order_in_which_peers_are_listed():
    progress, round = rounds.next_round(rounds.start(Settings(batch=12), 12, 1, 10))
    arrivals = {peer: 40.0 if peer in (2, 10) else 1.0 for peer in round.assignment}
    commitments = {peer: commitment(round, peer) for peer in arrivals}
    decided = rounds.finish_round(progress, round, arrivals, commitments)
    as_text = sorted(arrivals, key=str)  # 0, 1, 10, 11, 2: what sorted JSON keys make of them
    listed = replace(round, assignment={peer: round.assignment[peer] for peer in as_text})
    mixed = {peer: arrivals[peer] for peer in as_text}
    assert rounds.finish_round(progress, listed, mixed, commitments) == decided
    assert decided[1].late == (2, 10)


def test_message_without_quorum_is_not_agreed():
    words = (Attestation(0, (0, 1), ""), Attestation(1, (1,), ""), Attestation(2, (1, 2), ""))
    assert rounds.agreed(words, 2) == (1,)
    assert rounds.agreed(words, 1) == (0, 1, 2)
    assert rounds.agreed(words, 3) == (1,)


def test_root_is_over_the_commitments_in_peer_order():
    commitments = {2: b"c", 0: b"a", 1: b"b"}
    attested = rounds.attest(5, (2, 0), commitments)
    assert attested == Attestation(5, (0, 2), merkle.root([b"a", b"c"]).hex())


@pytest.mark.parametrize(
    ("arrivals", "commitments"),
    [({0: 1.0}, {}), ({}, {0: b"a"}), ({9: 1.0}, {9: b"a"})],
    ids=["no commitment", "no arrival", "no trainer"],
)
def test_messages_that_are_not_the_trainers_are_refused(arrivals, commitments):
    progress, round = rounds.next_round(rounds.start(Settings(), 4, 1, 10))
    with pytest.raises(ValueError, match="all among"):
        rounds.finish_round(progress, round, arrivals, commitments)


def test_round_that_is_not_in_progress_is_refused():
    start = rounds.start(Settings(), 4, 1, 10)
    progress, round = rounds.next_round(start)
    for other in (start, rounds.finish_round(progress, round, {}, {})[0]):
        with pytest.raises(ValueError, match="round 1 is not in progress"):
            rounds.finish_round(other, round, {}, {})
    with pytest.raises(ValueError, match="not in progress"):
        rounds.finish_round(progress, replace(round, data_index=1), {}, {})


@pytest.mark.parametrize(
    ("settings", "count", "start_step", "message"),
    [
        (Settings(), 3, 0, r"\[peers\] count = 3, expected 4"),
        (Settings(), 257, 0, r"\[peers\] count = 257, expected 4 .* to 256"),
        (Settings(verification_percent=50), 4, 0, r"verification_percent = 50, expected 0"),
        (Settings(), 4, 10, r"total_steps = 10, expected more than the 10"),
    ],
)
def test_run_that_could_not_train_is_refused_with_its_key(settings, count, start_step, message):
    with pytest.raises(LockstepError, match=message) as refusal:
        rounds.start(settings, count, 1, 10, start_step=start_step)
    assert "\n" not in str(refusal.value)


def test_run_without_enough_members_or_paused_does_not_hang():
    progress = rounds.start(Settings(), 4, 1, 10)
    alone = replace(progress, state=replace(progress.state, pending=(0,)))
    with pytest.raises(CoordinatorError, match="never come"):
        rounds.next_round(alone)
    with pytest.raises(CoordinatorError, match="halted"):
        rounds.next_round(replace(progress, state=tick(progress.state, Pause(1))))


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    batch=st.integers(1, 20),
    witness_nodes=st.integers(0, 9),
    total_steps=st.integers(1, 12),
    by_time=st.booleans(),
    seed=st.integers(0, 2**64),
    seconds=st.lists(st.floats(0, 40), min_size=9, max_size=9),
)
def test_every_sequence_is_trained_once_whoever_is_late(
    count, batch, witness_nodes, total_steps, by_time, seed, seconds
):
    settings = Settings(
        init_min_clients=count,
        min_clients=count,
        witness_nodes=min(witness_nodes, count),
        total_steps=total_steps,
        batch=batch,
        epoch_time=50 if by_time else None,
        rounds_per_epoch=None if by_time else 3,
    )
    progress, data_index, clock, steps, epoch = (
        rounds.start(settings, count, seed, 10),
        0,
        0.0,
        0,
        0,
    )
    while True:
        progress, round = rounds.next_round(progress)
        if round is None:
            break
        steps += 1
        assert round.step == steps and round.epoch in (epoch, epoch + 1)
        epoch = round.epoch
        spans = sorted(round.assignment.values())
        taken = [i for first, last in spans for i in range(first, last + 1)]
        assert taken == list(range(data_index, data_index + settings.batch_size(data_index * 10)))
        data_index += len(taken)
        arrivals = {peer: seconds[(peer + steps) % 9] for peer in round.assignment}
        commitments = {peer: commitment(round, peer) for peer in arrivals}
        progress, decision = rounds.finish_round(progress, round, arrivals, commitments)
        assert decision.applied == tuple(p for p in sorted(arrivals) if arrivals[p] <= 30)
        assert sorted(decision.applied + decision.late) == sorted(arrivals)
        assert decision.now >= clock + decision.train_seconds + 2 and decision.train_seconds <= 30
        clock = decision.now
    assert steps == total_steps
