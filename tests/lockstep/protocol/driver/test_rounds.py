"""Rounds, epochs and the clock: exactly K rounds, and no sequence lost in any."""

from dataclasses import replace

import pytest

from lockstep.protocol import committee, consensus, driver, sets
from lockstep.protocol.coordinator import CoordinatorError, Pause, RunState, tick
from lockstep.protocol.round import Decision, Message, Round
from tests.errors import refused
from tests.lockstep.protocol import records
from tests.lockstep.protocol.driver.driven_run import (
    LONG,
    VERIFIED,
    Settings,
    begun,
    commitment,
    evidence,
    spans,
    started,
    train,
)


def test_total_steps_trains_exactly_that_many_rounds():
    trained, _, progress = train(begun())
    assert [round.step for round in trained] == list(range(1, 11))
    assert [round.epoch for round in trained] == [0] * 4 + [1] * 4 + [2] * 2
    assert {round.joined for round in trained} == {()}  # who joins at the start is no newcomer
    assert progress.state.run_state == RunState.Finished


def test_clock_adds_up_over_epochs():
    _, decided, progress = train(begun(), seconds=1.5)
    # Each epoch: 3 waiting, no warm-up, 3.5 a round, 5 cooling down.
    assert [decision.now for decision in decided[:5]] == [6.5, 10.0, 13.5, 17.0, 28.5]
    assert progress.now == 3 * 3 + 10 * 3.5 + 3 * 5
    assert {decision.train_seconds for decision in decided} == {1.5}


def test_epoch_by_time_ends_at_a_round_boundary_and_loses_no_batch():
    settings = Settings(epoch_time=60, rounds_per_epoch=None)
    trained, decided, _ = train(begun(settings), seconds=28.0)
    # 30 seconds a round: the second round of an epoch ends at 60, which is in time.
    assert [round.epoch for round in trained] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({decision.applied for decision in decided}) == 1


def test_round_is_a_pure_function_of_seed_step_and_data_index():
    whole, _, _ = train(begun())
    again, _, _ = train(begun(), seconds=25.0)
    assert again == whole  # whatever the clock says
    sixth = whole[5]
    extended, _, _ = train(begun(step=5, data_index=sixth.data_index))
    assert [round.step for round in extended] == [6, 7, 8, 9, 10]
    assert extended[0] == replace(sixth, epoch=0)
    assert extended[0].seed == committee.round_seed(1, 6)
    other, _, _ = train(begun(seed=2))
    assert all(a.seed != b.seed for a, b in zip(whole, other, strict=True))


def test_round_is_pinned():
    progress, round = driver.next_round(begun())
    assert round == Round(
        step=1,
        epoch=0,
        seed=17934626734559793897,
        data_index=0,
        batch_size=8,
        peers=(0, 1, 2, 3),
        assignment={0: (6, 7), 1: (4, 5), 2: (0, 1), 3: (2, 3)},
        verifiers=(),
        witnesses=(0, 2, 3),
        joined=(),
    )
    assert (progress.now, round.trainers) == (3.0, 4)


def test_verifiers_train_nothing_and_each_is_given_a_trainer_with_work():
    for settings in (VERIFIED, replace(VERIFIED, batch=2)):
        _, round = driver.next_round(begun(settings, 5))
        (verifier,) = round.verifiers
        assert verifier not in round.assignment
        assert consensus.checked(round, evidence(round))[verifier] in round.assignment
        assert (round.trainers, len(round.assignment)) == (4, min(4, settings.batch))


def test_next_round_asked_again_gives_the_same_round():
    progress, round = driver.next_round(begun())
    assert driver.next_round(progress) == (progress, round)


def test_all_messages_in_time_are_all_applied_and_the_round_ends_early():
    progress, round = driver.next_round(begun())
    arrivals = {0: 4.0, 1: 30.0, 2: 0.5, 3: 7.0}  # the last moment is in time
    _, decision = driver.finish_round(progress, round, evidence(round, arrivals))
    assert decision == Decision(
        applied=(0, 1, 2, 3),
        late=(),
        dropped=(),
        ejected={},
        quorum=2,
        train_seconds=30.0,
        now=3 + 30 + 2.0,
    )


def test_honest_witnesses_attest_to_what_arrived_in_time_and_was_not_refused():
    _, round = driver.next_round(begun())
    said = evidence(round, {1: 31.0}, refused=(3, 1)).attestations
    assert [word.witness for word in said] == list(round.witnesses)
    root = sets.root([bytes.fromhex(commitment(round, p)) for p in (0, 2)]).hex()
    assert {(word.received, word.refused, word.root) for word in said} == {((0, 2), (3,), root)}


@pytest.mark.parametrize("lateness", [30.001, float("inf"), float("nan"), None])
def test_late_message_is_applied_by_nobody_and_its_sequences_are_given_out_again(lateness):
    progress, round = driver.next_round(begun())
    progress, decision = driver.finish_round(progress, round, evidence(round, {1: lateness}))
    assert (decision.applied, decision.late) == ((0, 2, 3), (1,))
    assert (decision.train_seconds, decision.now) == (30.0, 35.0)
    _, after = driver.next_round(progress)
    assert round.assignment[1] in spans(after)
    assert (after.data_index, after.batch_size) == (8, 8)  # 6 of which are new


def test_round_in_which_nothing_arrives_applies_nothing_and_all_is_given_out_again():
    progress, round = driver.next_round(begun())
    nothing = evidence(round, dict.fromkeys(range(4)))
    assert {word.root for word in nothing.attestations} == {sets.EMPTY.hex()}
    progress, decision = driver.finish_round(progress, round, nothing)
    assert (decision.applied, decision.late) == ((), (0, 1, 2, 3))
    _, after = driver.next_round(progress)
    assert (after.step, spans(after)) == (2, spans(round))


def test_peer_without_sequences_is_waited_for_by_nobody():
    progress, round = driver.next_round(begun(Settings(batch=2)))
    assert len(round.assignment) == 2
    _, decision = driver.finish_round(progress, round, evidence(round))
    assert (decision.applied, decision.late) == (tuple(sorted(round.assignment)), ())
    assert decision.train_seconds == 1.0


def test_decision_does_not_depend_on_the_order_in_which_peers_are_listed():
    progress, round = driver.next_round(begun(Settings(batch=12), 12))
    said = evidence(round, {2: 40.0, 10: 40.0})
    decided = driver.finish_round(progress, round, said)
    as_text = sorted(round.assignment, key=str)  # 0, 1, 10, 11, 2: what sorted JSON makes of them
    listed = replace(round, assignment={peer: round.assignment[peer] for peer in as_text})
    mixed = replace(said, arrivals={peer: said.arrivals[peer] for peer in as_text})
    assert driver.finish_round(progress, listed, mixed) == decided
    assert decided[1].late == (2, 10)


def test_first_member_stores_the_params_that_end_an_epoch():
    progress, round = driver.next_round(
        begun(replace(LONG, rounds_per_epoch=1), 5, stores_epochs=True)
    )
    assert driver.checkpointer(progress) is None
    with pytest.raises(CoordinatorError, match="expected Cooldown"):
        driver.checkpointed(progress, 0, "ab" * 32)
    progress, _ = driver.finish_round(driver.leave(progress, [0]), round, evidence(round))
    assert driver.checkpointer(progress) == 1
    progress = driver.checkpointed(progress, 1, "ab" * 32)
    assert (progress.state.checkpointer, progress.state.checkpoint) == (1, "ab" * 32)


# ---- A pause: it ends the epoch, and the members go on as they were ----


def test_pause_ends_the_epoch_and_resumed_members_go_on_as_they_were():
    whole, decided, _ = train(begun())  # epochs of 4 rounds
    progress = begun()
    trained, clock = [], []
    while True:
        if progress.pausing:
            with pytest.raises(CoordinatorError, match="halted"):
                driver.next_round(progress)  # until it is resumed
            progress = driver.resume(progress)
        progress, round = driver.next_round(progress)
        if round is None:
            break
        if round.step == 2:
            progress = driver.pause(progress)
        progress, decision = driver.finish_round(progress, round, evidence(round))
        assert progress.pausing == (round.step == 2)
        trained.append(round)
        clock.append(decision.now)
    assert [round.epoch for round in trained] == [0] * 2 + [1] * 4 + [2] * 4
    assert [replace(round, epoch=0) for round in trained] == [replace(r, epoch=0) for r in whole]
    assert clock[2] - clock[1] == decided[4].now - decided[3].now  # as between any two epochs


def test_pause_in_the_last_round_changes_nothing_and_only_a_pause_can_be_resumed():
    progress, round = driver.next_round(begun(replace(Settings(), total_steps=1)))
    with pytest.raises(CoordinatorError, match="not paused"):
        driver.resume(progress)
    progress, _ = driver.finish_round(driver.pause(progress), round, evidence(round))
    assert driver.next_round(driver.resume(progress))[1] is None


# ---- What the driver refuses: evidence of others, and runs that could not train ----


@pytest.mark.parametrize("peer", [5, -1])
def test_peer_that_the_run_does_not_have_cannot_ask(peer):
    with refused(peer, 5, error=CoordinatorError):
        driver.ask(started(LONG, 5), [peer])


@pytest.mark.parametrize(
    ("arrivals", "senders"),
    [({0: 1.0}, ()), ({9: 1.0}, (9,)), ({}, (9,))],
    ids=["no message", "no trainer", "no trainer, no arrival"],
)
def test_messages_that_are_not_the_trainers_are_refused(arrivals, senders):
    progress, round = driver.next_round(begun())
    with pytest.raises(ValueError, match="all among"):
        sent = dict.fromkeys(senders, Message("ab" * 32, 1))
        driver.finish_round(progress, round, records.evidence(sent, arrivals=arrivals))


def test_round_that_is_not_in_progress_is_refused():
    start = begun()
    progress, round = driver.next_round(start)
    said = evidence(round)
    for other in (start, driver.finish_round(progress, round, said)[0]):
        with refused("round 1", error=ValueError):
            driver.finish_round(other, round, said)
    with refused("round 1", error=ValueError):
        driver.finish_round(progress, replace(round, data_index=1), said)


@pytest.mark.parametrize(
    ("count", "step", "key", "value", "bound"),
    [(3, 0, "count", 3, 4), (257, 0, "count", 257, 256), (4, 10, "total_steps", 10, 10)],
)
def test_run_that_could_not_train_is_refused_with_its_key(count, step, key, value, bound):
    with refused(key, value, bound):
        started(Settings(), count, step=step)


def test_run_without_enough_members_or_paused_does_not_hang():
    progress = started(Settings(), 4)
    for alone in (progress, driver.ask(progress, range(3))):
        after, round = driver.next_round(alone)
        assert round is None and after.waiting
    paused = replace(begun(), state=tick(begun().state, Pause(1)))
    with pytest.raises(CoordinatorError, match="halted"):
        driver.next_round(paused)
