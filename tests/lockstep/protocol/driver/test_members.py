"""Who joins, is not heard from, comes back or leaves."""

from dataclasses import replace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.coordinator import CoordinatorError
from tests.lockstep.protocol.driver.driven_run import (
    LONG,
    Settings,
    begun,
    evidence,
    spans,
    started,
    train,
)


def test_member_that_nobody_hears_from_is_dropped_and_may_come_back_next_epoch():
    settings = replace(LONG, rounds_per_epoch=3)
    progress, round = driver.next_round(begun(settings, 5))
    progress, decision = driver.finish_round(progress, round, evidence(round, silent=(2,)))
    assert (decision.dropped, decision.ejected, decision.late) == ((2,), {}, (2,))
    assert decision.train_seconds == 30.0
    progress = driver.ask(progress, [2])
    seen = []
    for _ in range(4):
        progress, round = driver.next_round(progress)
        seen.append((round.epoch, 2 in round.peers, round.joined))
        progress, _ = driver.finish_round(progress, round, evidence(round))
    assert seen == [(0, False, ()), (0, False, ()), (1, True, (2,)), (1, True, ())]


def test_peer_that_joins_a_run_waits_for_the_epochs_end_and_for_its_params():
    progress = started(Settings(), 5, loads=[0, 0, 0, 0, 7.0])
    progress, round = driver.next_round(driver.ask(progress, range(4)))
    progress = driver.ask(progress, [4])
    trained, decided, _ = train(progress)
    assert [len(round.peers) for round in trained] == [4] * 4 + [5] * 6
    assert [round.joined for round in trained] == [()] * 4 + [(4,)] + [()] * 5
    # 3 waiting and 3 a round; then 5 cooling down, 3 waiting, and 7 until it has the params.
    assert decided[4].now - decided[3].now == 5 + 3 + 7 + 3
    assert decided[8].now - decided[7].now == 5 + 3 + 3  # nobody loads anything any more


def test_peer_that_cannot_load_within_the_warmup_is_silent_and_dropped():
    progress = started(Settings(), 5, loads=[0, 0, 0, 0, 20.5])
    progress, _ = driver.next_round(driver.ask(progress, range(4)))
    progress = driver.ask(progress, [4])
    seen = []
    while True:
        progress, round = driver.next_round(progress)
        if round is None:
            break
        seen.append((round.step, 4 in round.peers, round.joined, progress.unready))
        said = evidence(round, silent=progress.unready)
        progress, decision = driver.finish_round(progress, round, said)
        assert decision.dropped == ((4,) if round.step == 5 else ())
    assert seen[4] == (5, True, (4,), (4,))
    assert {row[1:] for row in seen if row[0] != 5} == {(False, (), ())}


def test_peer_that_leaves_in_a_round_has_its_message_applied_and_no_seat_in_the_next():
    settings = replace(LONG, rounds_per_epoch=3)
    progress, round = driver.next_round(begun(settings, 5))
    progress = driver.leave(progress, [round.witnesses[0]])
    progress, decision = driver.finish_round(progress, round, evidence(round))
    assert decision.applied == tuple(range(5)) and decision.train_seconds == 1.0
    (left,) = progress.left
    progress = driver.ask(progress, [left])  # it may come back, as a newcomer
    assert progress.left == ()
    seen = []
    for _ in range(4):
        progress, round = driver.next_round(progress)
        seen.append((left in round.peers, round.joined))
        progress, _ = driver.finish_round(progress, round, evidence(round))
    assert seen == [(False, ()), (False, ()), (True, (left,)), (True, ())]


def test_peer_that_leaves_without_its_message_is_not_dropped_besides():
    progress, round = driver.next_round(begun(LONG, 5))
    progress, decision = driver.finish_round(
        driver.leave(progress, [2]), round, evidence(round, silent=(2,))
    )
    assert (decision.late, decision.dropped) == ((2,), ())
    _, after = driver.next_round(progress)
    assert after.peers == (0, 1, 3, 4) and round.assignment[2] in spans(after)


def test_peer_that_asked_and_leaves_before_its_first_round_is_no_newcomer_twice():
    progress, _ = driver.next_round(driver.ask(started(LONG, 6), range(5)))
    progress = driver.ask(driver.leave(driver.ask(progress, [5]), [5]), [5])
    assert (progress.fresh, progress.left, progress.state.pending) == ((5,), (), (5,))


@pytest.mark.parametrize("peers", [[5], [-1], [2, 2]])
def test_peer_that_takes_no_part_cannot_leave(peers):
    progress, _ = driver.next_round(begun(LONG, 5))
    with pytest.raises(CoordinatorError, match="not a member"):
        driver.leave(progress, peers)
