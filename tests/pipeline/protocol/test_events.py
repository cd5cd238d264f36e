"""What a state says of itself, and its JSON form."""

import json
from dataclasses import replace

import pytest

from pipeline.protocol import committee
from pipeline.protocol.coordinator import (
    ClientState,
    CoordinatorState,
    Eject,
    Leave,
    RunState,
    tick,
)
from tests.pipeline.protocol.three_peers import (
    ALL,
    BOTH,
    DROPPED,
    SEED,
    Settings,
    at,
    heard,
    records,
)


def test_names_and_numbers_are_psyches():
    names = (
        "Uninitialized WaitingForMembers Warmup RoundTrain RoundWitness Cooldown Finished Paused"
    )
    assert [(state.name, state.value) for state in RunState] == list(
        zip(names.split(), range(8), strict=True)
    )
    assert [state.name for state in ClientState] == ["Healthy", "Dropped", "Withdrawn", "Ejected"]
    assert [state.value for state in ClientState] == [0, 1, 2, 3]


def test_state_survives_json():
    state = at(
        RunState.RoundWitness,
        spoken=BOTH,
        participants=(ALL, heard(1)),
        exited=records(1, 2, state=DROPPED),
        pending=(7, 8),
        since=0.1 + 0.2,
        ejected=(9,),
        untrained=((3, 5), (0, 1)),
        missed=((8, 9),),
        checkpoint="a" * 64,
        checkpointer=3,
    )
    nothing = replace(state, missed=(), untrained=(), checkpoint=None, checkpointer=None)
    for written in (state, nothing, replace(state, missed=None)):
        data = written.to_json()
        assert json.loads(json.dumps(data)) == data
        assert CoordinatorState.from_json(data, state.settings) == written


def test_state_with_a_key_missing_is_not_read():
    data = at(RunState.Warmup).to_json()
    del data["height"]
    with pytest.raises(TypeError, match="height"):
        CoordinatorState.from_json(data, Settings())


def test_seats_and_plan_are_the_rounds_until_it_is_over():
    members = records(*range(10))
    state = at(RunState.RoundTrain, peers=members, settings=Settings(verification_percent=30))
    assert {*state.verifiers} == committee.verifiers(SEED, 10, 30)
    assert len(state.verifiers) == 3
    assert sorted(state.trainers + state.verifiers) == list(range(10))
    assert state.plan.spans == committee.plan(state.trainers, SEED, 0, 8).spans
    gone = tick(tick(state, Leave((state.trainers[0],), 101)), Eject((state.verifiers[0],), 101))
    assert (gone.trainers, gone.verifiers, gone.plan) == (
        state.trainers,
        state.verifiers,
        state.plan,
    )
