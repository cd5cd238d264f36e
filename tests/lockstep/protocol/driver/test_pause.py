"""A pause: it ends the epoch, and the members go on as they were."""

from dataclasses import replace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.coordinator import CoordinatorError
from tests.lockstep.protocol.driver.driven_run import Settings, begun, evidence, train


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
