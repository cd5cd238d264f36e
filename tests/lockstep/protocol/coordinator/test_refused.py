"""Events that a state refuses, each in a line that names both."""

import pytest

from lockstep.protocol.coordinator import (
    Checkpointed,
    CoordinatorError,
    Eject,
    HealthCheck,
    Join,
    Leave,
    Pause,
    Resume,
    RunState,
    Tick,
    Untrained,
    WarmupWitness,
    WitnessReport,
    tick,
)
from tests.lockstep.protocol.coordinator.rows import ONE_GONE
from tests.lockstep.protocol.three_peers import (
    ALL,
    BOTH,
    EJECTED,
    EVERYONE,
    FIRST,
    OTHER,
    SECOND,
    SPANS,
    at,
    heard,
    records,
    waiting,
)

LIED = (*records(0, 1), *records(2, state=EJECTED))
ONE_HEARD = {"spoken": BOTH, "participants": (heard(FIRST), heard(FIRST))}

REFUSED = {
    "tick: uninitialized": (at(RunState.Uninitialized), Tick(101, 7), "halted"),
    "tick: finished": (at(RunState.Finished), Tick(101, 7), "halted"),
    "tick: paused": (at(RunState.Paused), Tick(101, 7), "halted"),
    "tick: earlier than the state": (at(RunState.Warmup), Tick(99, 7), "began at 100"),
    "join: finished": (at(RunState.Finished), Join((7,)), "takes no members"),
    "join: uninitialized": (at(RunState.Uninitialized), Join((7,)), "takes no members"),
    "join: twice": (waiting(), Join((1,)), "member already"),
    "join: a member": (at(RunState.Cooldown), Join((1,)), "member already"),
    "warm-up witness: in a round": (
        at(RunState.RoundTrain),
        WarmupWitness(FIRST, 101, 7, ALL),
        "expected Warmup",
    ),
    "warm-up witness: not elected": (
        at(RunState.Warmup),
        WarmupWitness(OTHER, 101, 7, ALL),
        "the witnesses are",
    ),
    "witness: in warm-up": (
        at(RunState.Warmup),
        WitnessReport(FIRST, 101, ALL),
        "expected RoundTrain or",
    ),
    "witness: in cooldown": (
        at(RunState.Cooldown),
        WitnessReport(FIRST, 101, ALL),
        "expected RoundTrain or",
    ),
    "witness: while waiting": (waiting(), WitnessReport(0, 1, ALL), "expected RoundTrain or"),
    "witness: not elected": (
        at(RunState.RoundTrain),
        WitnessReport(OTHER, 101, ALL),
        "the witnesses are",
    ),
    "witness: no member": (
        at(RunState.RoundTrain),
        WitnessReport(99, 101, ALL),
        "the witnesses are",
    ),
    "witness: twice": (
        at(RunState.RoundTrain, spoken=(FIRST,)),
        WitnessReport(FIRST, 101, ALL),
        "spoken already",
    ),
    "pause: finished": (at(RunState.Finished), Pause(101), "halted already"),
    "pause: paused": (at(RunState.Paused), Pause(101), "halted already"),
    "resume: running": (at(RunState.RoundTrain), Resume(101), "not paused"),
    "join: ejected in this round": (
        at(RunState.RoundWitness, peers=LIED, ejected=(2,)),
        Join((2,)),
        "was ejected",
    ),
    "join: ejected long ago": (waiting(ejected=(5,)), Join((5,)), "was ejected"),
    "leave: a stranger": (at(RunState.RoundTrain), Leave((7,), 101), "not a member"),
    "leave: twice": (at(RunState.RoundTrain, peers=ONE_GONE), Leave((2,), 101), "not a member"),
    "leave: earlier than the state": (at(RunState.RoundTrain), Leave((1,), 99), "began at 100"),
    "health check: in training": (
        at(RunState.RoundTrain, **ONE_HEARD),
        HealthCheck(FIRST, (OTHER,), 101),
        "expected Warmup or RoundWitness",
    ),
    "health check: in cooldown": (
        at(RunState.Cooldown, **ONE_HEARD),
        HealthCheck(FIRST, (OTHER,), 101),
        "expected Warmup or RoundWitness",
    ),
    "health check: by a peer that is not a witness": (
        at(RunState.RoundWitness, **ONE_HEARD),
        HealthCheck(OTHER, (OTHER,), 101),
        "the witnesses are",
    ),
    "health check: before a quorum spoke": (
        at(RunState.RoundWitness, spoken=(FIRST,), participants=(heard(FIRST),)),
        HealthCheck(FIRST, (OTHER,), 101),
        "1 witnesses spoke, expected 2",
    ),
    "health check: a stranger": (
        at(RunState.RoundWitness, **ONE_HEARD),
        HealthCheck(FIRST, (OTHER, 7), 101),
        "peer 7 is not a member",
    ),
    "health check: a peer that is dropped already": (
        at(RunState.RoundWitness, peers=ONE_GONE, **ONE_HEARD),
        HealthCheck(FIRST, (2,), 101),
        "peer 2 is not a member",
    ),
    "health check: a healthy peer": (
        at(RunState.RoundWitness, spoken=BOTH, participants=(ALL, ALL)),
        HealthCheck(FIRST, (OTHER,), 101),
        f"peer {OTHER} is healthy",
    ),
    "health check: a healthy peer beside one that is gone": (
        at(RunState.RoundWitness, spoken=BOTH, participants=(ALL, heard(*BOTH))),
        HealthCheck(FIRST, (OTHER, SECOND), 101),
        f"peer {SECOND} is healthy",
    ),
    "health check: a peer that the quorum heard, though not all": (
        at(
            RunState.RoundWitness,
            settings=EVERYONE,
            spoken=(0, 1, 2),
            participants=(ALL, ALL, heard(0)),
        ),
        HealthCheck(0, (2,), 101),
        "peer 2 is healthy",
    ),
    "eject: in warm-up": (
        at(RunState.Warmup),
        Eject((1,), 101),
        "expected RoundTrain or RoundWitness",
    ),
    "eject: in cooldown": (at(RunState.Cooldown), Eject((1,), 101), "expected RoundTrain or"),
    "eject: a stranger": (at(RunState.RoundTrain), Eject((7,), 101), "not a member"),
    "eject: twice": (
        at(RunState.RoundWitness, peers=LIED, ejected=(2,)),
        Eject((2,), 101),
        "not a member",
    ),
    "untrained: while training": (
        at(RunState.RoundTrain),
        Untrained((SPANS[0],), 101),
        "expected RoundWitness",
    ),
    "untrained: in cooldown": (at(RunState.Cooldown), Untrained((), 101), "expected RoundWitness"),
    "untrained: said already": (
        at(RunState.RoundWitness, missed=(SPANS[0],)),
        Untrained((SPANS[1],), 101),
        "known already",
    ),
    "untrained: said already that nothing is": (
        at(RunState.RoundWitness, missed=()),
        Untrained((SPANS[1],), 101),
        "known already",
    ),
    "untrained: a part of a span": (
        at(RunState.RoundWitness),
        Untrained((SPANS[0], (SPANS[1][0], SPANS[1][0])), 101),
        "not one of the round's spans",
    ),
    "untrained: a span twice": (
        at(RunState.RoundWitness),
        Untrained((SPANS[0], SPANS[0]), 101),
        "or is there twice",
    ),
    "checkpointed: in a round": (
        at(RunState.RoundWitness),
        Checkpointed(1, 101, "a" * 64),
        "expected Cooldown",
    ),
    "checkpointed: while waiting": (waiting(), Checkpointed(1, 101, "a" * 64), "expected Cooldown"),
    "checkpointed: a stranger": (
        at(RunState.Cooldown),
        Checkpointed(7, 101, "a" * 64),
        "not a member",
    ),
    "checkpointed: a peer that is gone": (
        at(RunState.Cooldown, peers=ONE_GONE),
        Checkpointed(2, 101, "a" * 64),
        "not a member",
    ),
    "checkpointed: other params than the first": (
        at(RunState.Cooldown, checkpoint="a" * 64, checkpointer=1),
        Checkpointed(2, 101, "b" * 64),
        "peer 1 stored aaaa",
    ),
    "pause: uninitialized": (at(RunState.Uninitialized), Pause(101), "halted already"),
    "resume: finished": (at(RunState.Finished), Resume(101), "not paused"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_wrong_event_is_refused_with_the_state_and_the_event(row):
    state, event, reason = row
    with pytest.raises(CoordinatorError, match=reason) as refusal:
        tick(state, event)
    message = str(refusal.value)
    assert state.run_state.name in message and repr(event) in message and "\n" not in message
