"""A pause, at once or when the epoch is over, and going on after it."""

import pytest

from lockstep.protocol.coordinator import Pause, Resume, RunState, Tick
from tests.lockstep.protocol.coordinator.rows import ONE_GONE, found_and_expected
from tests.lockstep.protocol.three_peers import BOTH, DROPPED, WITHDRAWN, at, records, waiting

TRANSITIONS = {
    "witness: a pause is pending": (
        at(RunState.RoundWitness, spoken=BOTH, pending_pause=True),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "pending_pause": True},
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
}


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    found, expected = found_and_expected(*row)
    assert found == expected
