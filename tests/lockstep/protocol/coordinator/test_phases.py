"""The phases of an epoch: a row for each way out of one, and for each that is not taken yet."""

import subprocess
import sys

import pytest

from lockstep.protocol.coordinator import (
    Checkpointed,
    Join,
    RunState,
    Tick,
    WarmupWitness,
    WitnessReport,
    tick,
)
from tests.lockstep.protocol.coordinator.rows import ONE_GONE, TWO_GONE, found_and_expected
from tests.lockstep.protocol.three_peers import (
    ALL,
    BOTH,
    EVERYONE,
    FIRST,
    SECOND,
    SEED,
    WITHDRAWN,
    Settings,
    at,
    heard,
    records,
    waiting,
)

BY_TIME = Settings(epoch_time=60, rounds_per_epoch=None)

TRANSITIONS = {
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
    found, expected = found_and_expected(*row)
    assert found == expected


def test_warm_up_of_no_seconds_takes_none():
    state = at(RunState.Warmup, settings=Settings(warmup_time=0))
    assert tick(state, Tick(100, 7)).run_state == RunState.RoundTrain


def test_coordinator_imports_no_jax():
    code = "import sys, lockstep.protocol.coordinator; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
