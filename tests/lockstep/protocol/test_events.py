"""What a state says of itself."""

from lockstep.protocol import committee
from lockstep.protocol.coordinator import (
    ClientState,
    Eject,
    Leave,
    RunState,
    tick,
)
from tests.lockstep.protocol.three_peers import (
    SEED,
    Settings,
    at,
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
