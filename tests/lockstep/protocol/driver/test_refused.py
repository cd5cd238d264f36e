"""What the driver refuses: evidence of others, and runs that could not train."""

from dataclasses import replace

import pytest

from lockstep.errors import LockstepError
from lockstep.protocol import driver
from lockstep.protocol.coordinator import CoordinatorError, Pause, tick
from lockstep.protocol.round import Message
from tests.lockstep.protocol import records
from tests.lockstep.protocol.driver.driven_run import LONG, Settings, begun, evidence


@pytest.mark.parametrize("peer", [5, -1])
def test_peer_that_the_run_does_not_have_cannot_ask(peer):
    with pytest.raises(CoordinatorError, match=r"expected one of the run's 5"):
        driver.ask(driver.start(LONG, 5, 1, 10), [peer])


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
        with pytest.raises(ValueError, match="round 1 is not in progress"):
            driver.finish_round(other, round, said)
    with pytest.raises(ValueError, match="not in progress"):
        driver.finish_round(progress, replace(round, data_index=1), said)


@pytest.mark.parametrize(
    ("count", "start_step", "message"),
    [
        (3, 0, r"\[peers\] count = 3, expected 4"),
        (257, 0, r"\[peers\] count = 257, expected 4 .* to 256"),
        (4, 10, r"total_steps = 10, expected more than the 10"),
    ],
)
def test_run_that_could_not_train_is_refused_with_its_key(count, start_step, message):
    with pytest.raises(LockstepError, match=message) as refusal:
        driver.start(Settings(), count, 1, 10, start_step=start_step)
    assert "\n" not in str(refusal.value)


def test_run_without_enough_members_or_paused_does_not_hang():
    progress = driver.start(Settings(), 4, 1, 10)
    for alone in (progress, driver.ask(progress, range(3))):
        with pytest.raises(CoordinatorError, match="never come"):
            driver.next_round(alone)
    paused = replace(begun(), state=tick(begun().state, Pause(1)))
    with pytest.raises(CoordinatorError, match="halted"):
        driver.next_round(paused)
