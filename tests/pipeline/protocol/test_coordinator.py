"""One row for each transition, each event that a state allows, and each that it refuses."""

import subprocess
import sys
from dataclasses import replace

import pytest

from pipeline.protocol import bloom, coordinator
from pipeline.protocol.coordinator import (
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
from tests.pipeline.protocol.three_peers import (
    ALL,
    BOTH,
    DROPPED,
    EJECTED,
    EVERYONE,
    FIRST,
    OTHER,
    SECOND,
    SEED,
    SPANS,
    WITHDRAWN,
    Settings,
    at,
    heard,
    records,
    waiting,
)

ONE_GONE = (*records(0, 1), *records(2, state=DROPPED))
TWO_GONE = (*records(0), *records(1, 2, state=DROPPED))
BY_TIME = Settings(epoch_time=60, rounds_per_epoch=None)

TRANSITIONS = {
    # from, event, what is expected to be so afterwards
    "waiting: enough members and the extra time over": (
        waiting(step=7, exited=records(9), checkpoint="1" * 64, checkpointer=4),
        Tick(10, SEED),
        {
            "run_state": RunState.Warmup,
            "since": 10,
            "epoch_start": 10,
            "height": 0,
            "seed": SEED,
            "peers": records(0, 1, 2),
            "pending": (),
            "exited": (),
            "spoken": (),
            "participants": (),
            "checkpoint": None,
            "checkpointer": None,
        },
    ),
    "waiting: an epoch takes 256 peers": (
        waiting(pending=tuple(range(300))),
        Tick(10, SEED),
        {"peers": records(*range(256)), "pending": tuple(range(256, 300))},
    ),
    "waiting: extra time not over": (waiting(), Tick(9.5, SEED), {}),
    "waiting: too few members": (waiting(pending=(0, 1)), Tick(99, SEED), {}),
    "waiting: a peer joins": (waiting(), Join((3,)), {"pending": (0, 1, 2, 3)}),
    "warm-up: timeout": (
        at(RunState.Warmup, spoken=(FIRST,)),
        Tick(120, 7),
        {"run_state": RunState.RoundTrain, "since": 120, "seed": 7, "spoken": (), "step": 1},
    ),
    "warm-up: not over": (at(RunState.Warmup), Tick(119, 7), {}),
    "warm-up: first of two witnesses": (
        at(RunState.Warmup),
        WarmupWitness(FIRST, 101, 7, ALL),
        {
            "run_state": RunState.Warmup,
            "spoken": (FIRST,),
            "participants": (ALL,),
            "since": 100,
            "seed": SEED,
        },
    ),
    "warm-up: all witnesses, early": (
        at(RunState.Warmup, spoken=(FIRST,), participants=(ALL,)),
        WarmupWitness(SECOND, 103, 7, ALL),
        {
            "run_state": RunState.RoundTrain,
            "since": 103,
            "seed": 7,
            "spoken": (),
            "participants": (),
        },
    ),
    "warm-up: one peer gone, enough left": (
        at(RunState.Warmup, peers=ONE_GONE),
        Tick(120, 7),
        {"run_state": RunState.RoundTrain, "peers": records(0, 1), "exited": ONE_GONE[2:]},
    ),
    "warm-up: too few left, before any time is over": (
        at(RunState.Warmup, peers=TWO_GONE, pending=(5,), epoch=3),
        Tick(101, 7),
        {
            "run_state": RunState.WaitingForMembers,
            "since": 101,
            "peers": (),
            "pending": (0, 5),
            "exited": TWO_GONE[1:],
            "epoch": 3,
            "step": 1,
        },
    ),
    "warm-up: too few left when the last witness speaks": (
        at(RunState.Warmup, peers=TWO_GONE, spoken=(FIRST,)),
        WarmupWitness(SECOND, 103, 7, ALL),
        {"run_state": RunState.WaitingForMembers, "pending": (0,)},
    ),
    "warm-up: too few left, and nothing left to train": (
        at(RunState.Warmup, peers=TWO_GONE, step=101),
        Tick(101, 7),
        {"run_state": RunState.Finished, "since": 101},
    ),
    "train: timeout": (
        at(RunState.RoundTrain, spoken=(FIRST,)),
        Tick(130, 7),
        {"run_state": RunState.RoundWitness, "since": 130, "spoken": (FIRST,), "step": 1},
    ),
    "train: not over": (at(RunState.RoundTrain), Tick(129, 7), {}),
    "train: first of two witnesses": (
        at(RunState.RoundTrain),
        WitnessReport(SECOND, 110, ALL),
        {
            "run_state": RunState.RoundTrain,
            "spoken": (SECOND,),
            "participants": (ALL,),
            "since": 100,
        },
    ),
    "train: all witnesses, early": (
        at(RunState.RoundTrain, spoken=(SECOND,), participants=(heard(SECOND),)),
        WitnessReport(FIRST, 111, ALL),
        {
            "run_state": RunState.RoundWitness,
            "since": 111,
            "spoken": (SECOND, FIRST),
            "participants": (heard(SECOND), ALL),
        },
    ),
    "witness: a witness speaks late": (
        at(RunState.RoundWitness, spoken=(FIRST,)),
        WitnessReport(SECOND, 101, ALL),
        {"run_state": RunState.RoundWitness, "since": 100, "spoken": BOTH},
    ),
    "witness: not over": (at(RunState.RoundWitness, spoken=BOTH), Tick(101, 7), {}),
    "witness: next round": (
        at(
            RunState.RoundWitness,
            spoken=BOTH,
            participants=(ALL, ALL),
            missed=(),
            step=5,
            data_index=96,
            height=1,
        ),
        Tick(102, 7),
        {
            "run_state": RunState.RoundTrain,
            "since": 102,
            "step": 6,
            "data_index": 104,
            "height": 2,
            "seed": 7,
            "spoken": (),
            "participants": (),
            "missed": None,
            "untrained": (),
            "epoch": 0,
        },
    ),
    "witness: the ramp is read where the batch begins": (
        at(RunState.RoundWitness, spoken=BOTH, data_index=104),
        Tick(102, 7),
        {"data_index": 120},
    ),
    "witness: the epoch's rounds are over": (
        at(RunState.RoundWitness, spoken=BOTH, height=3),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "height": 4, "step": 2, "data_index": 8},
    ),
    "witness: the epoch's time is not over": (
        at(RunState.RoundWitness, settings=BY_TIME, spoken=BOTH, height=99),
        Tick(109, 7),
        {"run_state": RunState.RoundTrain},
    ),
    "witness: the epoch's time is over": (
        at(RunState.RoundWitness, settings=BY_TIME, spoken=BOTH),
        Tick(110, 7),
        {"run_state": RunState.Cooldown, "step": 2, "data_index": 8},
    ),
    "witness: nobody spoke": (
        at(RunState.RoundWitness),
        Tick(102, 7),
        {
            "run_state": RunState.Cooldown,
            "peers": (),
            "exited": records(0, 1, 2, state=WITHDRAWN),
            "step": 2,
        },
    ),
    "witness: fewer spoke than the quorum of those elected": (
        at(RunState.RoundWitness, settings=EVERYONE, spoken=(FIRST,)),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "peers": records(0, 1, 2)},
    ),
    "witness: the quorum of those elected spoke": (
        at(RunState.RoundWitness, settings=EVERYONE, spoken=BOTH),
        Tick(102, 7),
        {"run_state": RunState.RoundTrain},
    ),
    "witness: one peer gone, enough left": (
        at(RunState.RoundWitness, peers=ONE_GONE, spoken=BOTH),
        Tick(102, 7),
        {"run_state": RunState.RoundTrain, "peers": records(0, 1), "exited": ONE_GONE[2:]},
    ),
    "witness: fewer than min_clients left": (
        at(RunState.RoundWitness, peers=TWO_GONE, spoken=BOTH),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "peers": records(0)},
    ),
    "witness: before the last step": (
        at(RunState.RoundWitness, spoken=BOTH, step=99),
        Tick(102, 7),
        {"run_state": RunState.RoundTrain, "step": 100},
    ),
    "witness: the last step": (
        at(RunState.RoundWitness, spoken=BOTH, step=100),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "step": 101},
    ),
    "witness: a pause is pending": (
        at(RunState.RoundWitness, spoken=BOTH, pending_pause=True),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "pending_pause": True},
    ),
    "cooldown: not over": (at(RunState.Cooldown), Tick(104, 7), {}),
    "cooldown: next epoch, members stay ahead of newcomers": (
        at(RunState.Cooldown, step=9, data_index=64, pending=(5,)),
        Tick(105, 7),
        {
            "run_state": RunState.WaitingForMembers,
            "since": 105,
            "epoch": 1,
            "step": 9,
            "data_index": 64,
            "peers": (),
            "pending": (0, 1, 2, 5),
        },
    ),
    "cooldown: a peer that is gone does not stay": (
        at(RunState.Cooldown, peers=ONE_GONE),
        Tick(105, 7),
        {"pending": (0, 1), "exited": ONE_GONE[2:]},
    ),
    "cooldown: the last step is done": (
        at(RunState.Cooldown, step=101),
        Tick(105, 7),
        {"run_state": RunState.Finished, "since": 105, "epoch": 1},
    ),
    "cooldown: the last step is not done": (
        at(RunState.Cooldown, step=100),
        Tick(105, 7),
        {"run_state": RunState.WaitingForMembers},
    ),
    "cooldown: a pause is pending": (
        at(RunState.Cooldown, pending_pause=True),
        Tick(105, 7),
        {
            "run_state": RunState.Paused,
            "since": 105,
            "epoch": 1,
            "pending_pause": False,
            "peers": (),
            "exited": records(0, 1, 2, state=WITHDRAWN),
        },
    ),
    "pause: waiting": (
        waiting(),
        Pause(3),
        {"run_state": RunState.Paused, "since": 3, "pending": (0, 1, 2)},
    ),
    "pause: warm-up": (
        at(RunState.Warmup),
        Pause(101),
        {"run_state": RunState.Paused, "peers": (), "exited": records(0, 1, 2, state=WITHDRAWN)},
    ),
    "pause: warm-up, when one peer was gone before": (
        at(RunState.Warmup, peers=ONE_GONE),
        Pause(101),
        {"exited": (*records(0, 1, state=WITHDRAWN), *records(2, state=DROPPED))},
    ),
    "pause: train": (
        at(RunState.RoundTrain),
        Pause(101),
        {"run_state": RunState.RoundTrain, "pending_pause": True, "since": 100},
    ),
    "pause: witness": (at(RunState.RoundWitness), Pause(101), {"pending_pause": True}),
    "pause: cooldown": (at(RunState.Cooldown), Pause(101), {"pending_pause": True}),
    "resume": (
        at(RunState.Paused, peers=(), pending=(4,)),
        Resume(101),
        {"run_state": RunState.WaitingForMembers, "since": 101, "pending": (4,)},
    ),
    "resume: nothing left to train": (
        at(RunState.Paused, peers=(), step=101),
        Resume(101),
        {"run_state": RunState.Finished},
    ),
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
    "untrained: said": (
        at(RunState.RoundWitness),
        Untrained((SPANS[1], SPANS[0]), 101),
        {"missed": (SPANS[1], SPANS[0]), "untrained": (), "data_index": 0},
    ),
    "untrained: nothing is": (at(RunState.RoundWitness), Untrained((), 101), {"missed": ()}),
    "witness: what was untrained waits for the next round": (
        at(RunState.RoundWitness, spoken=BOTH, missed=(SPANS[1],)),
        Tick(102, 7),
        {"untrained": (SPANS[1],), "missed": None, "data_index": 8},
    ),
    "witness: what found no place waits before what is untrained now": (
        # Two trainers take 3 sequences each; 3 more would pass the batch of 8, so 2 are new.
        at(
            RunState.RoundWitness,
            spoken=BOTH,
            data_index=50,
            untrained=((0, 29),),
            missed=((3, 5),),
        ),
        Tick(102, 7),
        {"untrained": ((6, 29), (3, 5)), "data_index": 52},
    ),
    "witness: without a quorum everything is untrained": (
        at(RunState.RoundWitness, spoken=(FIRST,), missed=(SPANS[1],)),
        Tick(102, 7),
        {"untrained": tuple(sorted(SPANS.values())), "data_index": 8},
    ),
    "cooldown: the first checkpoint": (
        at(RunState.Cooldown),
        Checkpointed(1, 101, "a" * 64),
        {"checkpoint": "a" * 64, "checkpointer": 1, "run_state": RunState.Cooldown},
    ),
    "cooldown: the same checkpoint from another": (
        at(RunState.Cooldown, checkpoint="a" * 64, checkpointer=1),
        Checkpointed(2, 101, "a" * 64),
        {},
    ),
    "cooldown: the checkpoint stays until the next epoch": (
        at(RunState.Cooldown, checkpoint="a" * 64, checkpointer=1),
        Tick(105, 7),
        {"run_state": RunState.WaitingForMembers, "checkpoint": "a" * 64, "checkpointer": 1},
    ),
}


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    before, event, expected = row
    after = tick(before, event)
    assert {name: getattr(after, name) for name in expected} == expected
    if not expected:
        assert after == before


def test_warm_up_of_no_seconds_takes_none():
    state = at(RunState.Warmup, settings=Settings(warmup_time=0))
    assert tick(state, Tick(100, 7)).run_state == RunState.RoundTrain


def test_coordinator_imports_no_jax():
    code = "import sys, pipeline.protocol.coordinator; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_participant_is_pinned():
    assert bloom.participant(258).hex().startswith("7255b3ce83a75f4d")


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


# ---- Events that a state refuses ----

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
    "health check: by a peer that is no witness": (
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
