"""Who joins, leaves, is not heard from or is ejected, and whether it comes back."""

from dataclasses import replace

import pytest

from lockstep.protocol import coordinator, sets
from lockstep.protocol.coordinator import (
    CoordinatorError,
    Eject,
    HealthCheck,
    Join,
    Leave,
    RunState,
    Tick,
    tick,
)
from tests.lockstep.protocol.coordinator.rows import ONE_GONE, TWO_GONE, found_and_expected
from tests.lockstep.protocol.three_peers import (
    ALL,
    BOTH,
    DROPPED,
    EJECTED,
    EVERYONE,
    FIRST,
    OTHER,
    WITHDRAWN,
    at,
    heard,
    records,
    waiting,
)

TRANSITIONS = {
    "join: during an epoch, for the next": (
        at(RunState.RoundTrain),
        Join((7,)),
        {"run_state": RunState.RoundTrain, "pending": (7,), "peers": records(0, 1, 2)},
    ),
    "join: a dropped peer comes back": (
        at(RunState.RoundTrain, peers=ONE_GONE),
        Join((2,)),
        {"pending": (2,), "peers": ONE_GONE},
    ),
    "join: while paused": (at(RunState.Paused, peers=()), Join((0,)), {"pending": (0,)}),
    "join: a peer that left": (
        at(RunState.RoundTrain, peers=(*records(0, 1), *records(2, state=WITHDRAWN))),
        Join((2,)),
        {"pending": (2,)},
    ),
    "leave: a member keeps its place until the round is over": (
        at(RunState.RoundTrain),
        Leave((1,), 101),
        {
            "peers": (*records(0), *records(1, state=WITHDRAWN), *records(2)),
            "exited": (),
            "witnesses": BOTH,
            "trainers": (0, 1, 2),
        },
    ),
    "leave: before the epoch": (waiting(), Leave((1,), 1), {"pending": (0, 2)}),
    "leave: before the next epoch, a peer that had been dropped": (
        at(RunState.RoundTrain, peers=ONE_GONE, pending=(2, 7)),
        Leave((2,), 101),
        {"pending": (7,), "peers": ONE_GONE},
    ),
    "leave: while paused": (
        at(RunState.Paused, peers=(), pending=(4, 5)),
        Leave((4,), 101),
        {"pending": (5,)},
    ),
    "health check: a peer that one of two witnesses heard": (
        at(RunState.RoundWitness, spoken=BOTH, participants=(ALL, heard(*BOTH))),
        HealthCheck(FIRST, (OTHER,), 101),
        {
            "run_state": RunState.RoundWitness,
            "peers": tuple(
                replace(record, state=DROPPED) if record.peer == OTHER else record
                for record in records(0, 1, 2)
            ),
            "witnesses": BOTH,
        },
    ),
    "health check: a witness that the quorum did not hear": (
        at(
            RunState.RoundWitness, settings=EVERYONE, spoken=(0, 1), participants=(heard(0, 1),) * 2
        ),
        HealthCheck(0, (2,), 101),
        {"peers": ONE_GONE},
    ),
    "health check: two peers": (
        at(RunState.RoundWitness, settings=EVERYONE, spoken=(0, 1), participants=(heard(0),) * 2),
        HealthCheck(1, (1, 2), 101),
        {"peers": TWO_GONE},
    ),
    "health check: in a warm-up": (
        at(RunState.Warmup, settings=EVERYONE, spoken=(0, 1), participants=(heard(0, 1),) * 2),
        HealthCheck(0, (2,), 101),
        {"run_state": RunState.Warmup, "peers": ONE_GONE},
    ),
    "health check: of nobody": (
        at(RunState.RoundWitness, spoken=BOTH, participants=(ALL, ALL)),
        HealthCheck(FIRST, (), 101),
        {},
    ),
    "eject: train": (
        at(RunState.RoundTrain, ejected=(9,)),
        Eject((2,), 101),
        {
            "run_state": RunState.RoundTrain,
            "peers": (*records(0, 1), *records(2, state=EJECTED)),
            "ejected": (9, 2),
            "trainers": (0, 1, 2),
            "witnesses": BOTH,
        },
    ),
    "eject: witness": (
        at(RunState.RoundWitness),
        Eject((0,), 101),
        {"peers": (*records(0, state=EJECTED), *records(1, 2)), "ejected": (0,)},
    ),
    "witness: an ejected peer goes": (
        at(
            RunState.RoundWitness,
            peers=(*records(0, 1), *records(2, state=EJECTED)),
            ejected=(2,),
            spoken=BOTH,
        ),
        Tick(102, 7),
        {"peers": records(0, 1), "exited": records(2, state=EJECTED), "ejected": (2,)},
    ),
    "cooldown: a peer that left does not stay": (
        at(RunState.Cooldown, peers=(*records(0, 1), *records(2, state=WITHDRAWN))),
        Tick(105, 7),
        {"pending": (0, 1)},
    ),
}


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    found, expected = found_and_expected(*row)
    assert found == expected


def test_participant_is_pinned():
    assert sets.participant(258).hex().startswith("7255b3ce83a75f4d")


def test_healthy_is_a_quorum_of_those_elected():
    state = at(RunState.RoundWitness, spoken=BOTH, participants=(ALL, heard(0)))
    assert coordinator.healthy(state, (0, 1)) == [True, False]
    everyone = replace(state, settings=EVERYONE, participants=(ALL, heard(0), heard(0, 1)))
    assert coordinator.healthy(everyone, (0, 1, 2)) == [True, True, False]


def test_a_liar_is_out_for_good_and_an_honest_peer_comes_back():
    state = tick(tick(at(RunState.RoundTrain), Eject((2,), 101)), Leave((1,), 101))
    state = tick(state, Join((1,)))
    for now in (130, 132, 137):  # nobody speaks: a round without witnesses, and the cooldown
        state = tick(state, Tick(now, 7))
    assert state.run_state == RunState.WaitingForMembers and state.pending == (1,)
    with pytest.raises(CoordinatorError, match="was ejected"):
        tick(state, Join((2,)))
