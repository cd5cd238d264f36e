"""One row for each transition, the events that a state refuses, and random sequences of both."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.swarm import coordinator
from pipeline.swarm.coordinator import (
    ClientState,
    CoordinatorError,
    Join,
    Pause,
    PeerRecord,
    Resume,
    RunState,
    State,
    Tick,
    WarmupWitness,
    Witness,
    tick,
)


@dataclass(frozen=True)
class Settings:
    """A run of 3 peers: seconds 10 waiting, 20 warm-up, 30 train, 2 witness, 5 cooldown."""

    init_min_clients: int = 3
    min_clients: int = 2
    witness_nodes: int = 2
    verification_percent: int = 0
    total_steps: int = 100
    waiting_for_members_extra_time: float = 10
    warmup_time: float = 20
    max_round_train_time: float = 30
    round_witness_time: float = 2
    cooldown_time: float = 5
    epoch_time: float | None = None
    rounds_per_epoch: int | None = 4

    def batch_size(self, tokens: int) -> int:
        return 8 if tokens < 1000 else 16  # a ramp in one step, at sequence 100 of 10 tokens


SEED = 12345
HEALTHY, DROPPED = ClientState.Healthy, ClientState.Dropped
WITHDRAWN = ClientState.Withdrawn


def records(*peers: int, state: ClientState = HEALTHY) -> tuple[PeerRecord, ...]:
    return tuple(PeerRecord(peer, state) for peer in peers)


def waiting(**changes) -> State:
    state = coordinator.start(Settings(), 10, step=1, data_index=0)
    return replace(state, **({"pending": (0, 1, 2)} | changes))


def at(run_state: RunState, **changes) -> State:
    """A state that began at second 100, in an epoch that began at 50, about peers 0, 1 and 2."""
    start = {"run_state": run_state, "since": 100, "epoch_start": 50, "pending": ()}
    return waiting(**(start | {"peers": records(0, 1, 2), "seed": SEED} | changes))


FIRST, SECOND = at(RunState.RoundTrain).witnesses
OTHER = ({0, 1, 2} - {FIRST, SECOND}).pop()
BOTH = (FIRST, SECOND)
ONE_GONE = (*records(0, 1), *records(2, state=DROPPED))
TWO_GONE = (*records(0), *records(1, 2, state=DROPPED))
BY_TIME = Settings(epoch_time=60, rounds_per_epoch=None)

TRANSITIONS = {
    # from, event, what is expected to be so afterwards
    "waiting: enough members and the extra time over": (
        waiting(step=7, exited=records(9), cold_start=True),
        Tick(10, SEED),
        {
            "run_state": RunState.Warmup,
            "since": 10,
            "epoch_start": 10,
            "epoch_start_step": 7,
            "height": 0,
            "seed": SEED,
            "peers": records(0, 1, 2),
            "pending": (),
            "exited": (),
            "cold_start": True,
            "spoken": (),
        },
    ),
    "waiting: an epoch takes 256 peers": (
        waiting(pending=tuple(range(300))),
        Tick(10, SEED),
        {"peers": records(*range(256)), "pending": tuple(range(256, 300))},
    ),
    "waiting: extra time not over": (waiting(), Tick(9.5, SEED), {}),
    "waiting: too few members": (waiting(pending=(0, 1)), Tick(99, SEED), {}),
    "waiting: a peer joins": (waiting(), Join(3), {"pending": (0, 1, 2, 3)}),
    "warm-up: timeout": (
        at(RunState.Warmup, spoken=(FIRST,)),
        Tick(120, 7),
        {"run_state": RunState.RoundTrain, "since": 120, "seed": 7, "spoken": (), "step": 1},
    ),
    "warm-up: not over": (at(RunState.Warmup), Tick(119, 7), {}),
    "warm-up: first of two witnesses": (
        at(RunState.Warmup),
        WarmupWitness(FIRST, 101, 7),
        {"run_state": RunState.Warmup, "spoken": (FIRST,), "since": 100, "seed": SEED},
    ),
    "warm-up: all witnesses, early": (
        at(RunState.Warmup, spoken=(FIRST,)),
        WarmupWitness(SECOND, 103, 7),
        {"run_state": RunState.RoundTrain, "since": 103, "seed": 7, "spoken": ()},
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
        WarmupWitness(SECOND, 103, 7),
        {"run_state": RunState.WaitingForMembers, "pending": (0,)},
    ),
    "train: timeout": (
        at(RunState.RoundTrain, spoken=(FIRST,)),
        Tick(130, 7),
        {"run_state": RunState.RoundWitness, "since": 130, "spoken": (FIRST,), "step": 1},
    ),
    "train: not over": (at(RunState.RoundTrain), Tick(129, 7), {}),
    "train: first of two witnesses": (
        at(RunState.RoundTrain),
        Witness(SECOND, 110),
        {"run_state": RunState.RoundTrain, "spoken": (SECOND,), "since": 100},
    ),
    "train: all witnesses, early": (
        at(RunState.RoundTrain, spoken=(SECOND,)),
        Witness(FIRST, 111),
        {"run_state": RunState.RoundWitness, "since": 111, "spoken": (SECOND, FIRST)},
    ),
    "witness: a witness speaks late": (
        at(RunState.RoundWitness, spoken=(FIRST,)),
        Witness(SECOND, 101),
        {"run_state": RunState.RoundWitness, "since": 100, "spoken": BOTH},
    ),
    "witness: not over": (at(RunState.RoundWitness, spoken=BOTH), Tick(101, 7), {}),
    "witness: next round": (
        at(RunState.RoundWitness, spoken=BOTH, step=5, data_index=96, height=1),
        Tick(102, 7),
        {
            "run_state": RunState.RoundTrain,
            "since": 102,
            "step": 6,
            "data_index": 104,
            "height": 2,
            "seed": 7,
            "spoken": (),
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
        at(RunState.RoundWitness, settings=Settings(witness_nodes=0), spoken=(FIRST,)),
        Tick(102, 7),
        {"run_state": RunState.Cooldown, "peers": records(0, 1, 2)},
    ),
    "witness: the quorum of those elected spoke": (
        at(RunState.RoundWitness, settings=Settings(witness_nodes=0), spoken=BOTH),
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
        at(RunState.Cooldown, step=9, data_index=64, pending=(5,), cold_start=True),
        Tick(105, 7),
        {
            "run_state": RunState.WaitingForMembers,
            "since": 105,
            "epoch": 1,
            "step": 9,
            "data_index": 64,
            "peers": (),
            "pending": (0, 1, 2, 5),
            "cold_start": False,
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
            "cold_start": True,
            "pending_pause": False,
            "peers": (),
            "exited": records(0, 1, 2, state=WITHDRAWN),
        },
    ),
    "pause: waiting": (
        waiting(),
        Pause(3),
        {"run_state": RunState.Paused, "since": 3, "cold_start": True, "pending": (0, 1, 2)},
    ),
    "pause: warm-up": (
        at(RunState.Warmup),
        Pause(101),
        {"run_state": RunState.Paused, "peers": (), "exited": records(0, 1, 2, state=WITHDRAWN)},
    ),
    "pause: train": (
        at(RunState.RoundTrain),
        Pause(101),
        {"run_state": RunState.RoundTrain, "pending_pause": True, "since": 100},
    ),
    "pause: witness": (at(RunState.RoundWitness), Pause(101), {"pending_pause": True}),
    "pause: cooldown": (at(RunState.Cooldown), Pause(101), {"pending_pause": True}),
    "resume": (
        at(RunState.Paused, peers=(), pending=(4,), cold_start=True),
        Resume(101),
        {
            "run_state": RunState.WaitingForMembers,
            "since": 101,
            "pending": (4,),
            "cold_start": True,
        },
    ),
    "resume: nothing left to train": (
        at(RunState.Paused, peers=(), step=101),
        Resume(101),
        {"run_state": RunState.Finished},
    ),
    "join: during an epoch, for the next": (
        at(RunState.RoundTrain),
        Join(7),
        {"run_state": RunState.RoundTrain, "pending": (7,), "peers": records(0, 1, 2)},
    ),
    "join: a dropped peer comes back": (
        at(RunState.RoundTrain, peers=ONE_GONE),
        Join(2),
        {"pending": (2,), "peers": ONE_GONE},
    ),
    "join: while paused": (at(RunState.Paused, peers=()), Join(0), {"pending": (0,)}),
}


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    before, event, expected = row
    after = tick(before, event)
    assert {name: getattr(after, name) for name in expected} == expected
    if not expected:
        assert after == before


REFUSED = {
    "tick: uninitialized": (at(RunState.Uninitialized), Tick(101, 7), "halted"),
    "tick: finished": (at(RunState.Finished), Tick(101, 7), "halted"),
    "tick: paused": (at(RunState.Paused), Tick(101, 7), "halted"),
    "tick: earlier than the state": (at(RunState.Warmup), Tick(99, 7), "began at 100"),
    "join: finished": (at(RunState.Finished), Join(7), "takes no members"),
    "join: uninitialized": (at(RunState.Uninitialized), Join(7), "takes no members"),
    "join: twice": (waiting(), Join(1), "member already"),
    "join: a member": (at(RunState.Cooldown), Join(1), "member already"),
    "warm-up witness: in a round": (
        at(RunState.RoundTrain),
        WarmupWitness(FIRST, 101, 7),
        "expected Warmup",
    ),
    "warm-up witness: not elected": (
        at(RunState.Warmup),
        WarmupWitness(OTHER, 101, 7),
        "the witnesses are",
    ),
    "witness: in warm-up": (at(RunState.Warmup), Witness(FIRST, 101), "expected RoundTrain or"),
    "witness: in cooldown": (at(RunState.Cooldown), Witness(FIRST, 101), "expected RoundTrain or"),
    "witness: while waiting": (waiting(), Witness(0, 1), "expected RoundTrain or"),
    "witness: not elected": (at(RunState.RoundTrain), Witness(OTHER, 101), "the witnesses are"),
    "witness: no member": (at(RunState.RoundTrain), Witness(99, 101), "the witnesses are"),
    "witness: twice": (
        at(RunState.RoundTrain, spoken=(FIRST,)),
        Witness(FIRST, 101),
        "spoken already",
    ),
    "pause: finished": (at(RunState.Finished), Pause(101), "halted already"),
    "pause: paused": (at(RunState.Paused), Pause(101), "halted already"),
    "resume: running": (at(RunState.RoundTrain), Resume(101), "not paused"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_wrong_event_is_refused_with_the_state_and_the_event(row):
    state, event, reason = row
    with pytest.raises(CoordinatorError, match=reason) as refusal:
        tick(state, event)
    message = str(refusal.value)
    assert state.run_state.name in message and repr(event) in message and "\n" not in message


def test_names_and_numbers_are_psyches():
    names = (
        "Uninitialized WaitingForMembers Warmup RoundTrain RoundWitness Cooldown Finished Paused"
    )
    assert [(state.name, state.value) for state in RunState] == list(
        zip(names.split(), range(8), strict=True)
    )
    assert [state.name for state in ClientState] == ["Healthy", "Dropped", "Withdrawn", "Ejected"]
    assert [state.value for state in ClientState] == [0, 1, 2, 3]


def test_warm_up_of_no_seconds_takes_none():
    state = at(RunState.Warmup, settings=Settings(warmup_time=0))
    assert tick(state, Tick(100, 7)).run_state == RunState.RoundTrain


def test_cold_start_ramp_holds_only_after_a_pause():
    state = at(RunState.RoundTrain, epoch_start_step=40)
    assert state.cold_start_bounds(10) is None
    assert replace(state, cold_start=True).cold_start_bounds(10) == (40, 50)


def test_state_survives_json():
    state = at(
        RunState.RoundWitness, spoken=BOTH, exited=TWO_GONE[1:], pending=(7, 8), since=0.1 + 0.2
    )
    text = json.dumps(state.to_json())
    assert State.from_json(json.loads(text), state.settings) == state


def test_state_with_a_key_missing_is_not_read():
    data = at(RunState.Warmup).to_json()
    del data["height"]
    with pytest.raises(TypeError, match="height"):
        State.from_json(data, Settings())


def test_coordinator_imports_no_jax():
    code = "import sys, pipeline.swarm.coordinator; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- random sequences ----

TABLE = {
    (RunState.WaitingForMembers, RunState.Warmup),
    (RunState.WaitingForMembers, RunState.Paused),
    (RunState.Warmup, RunState.WaitingForMembers),
    (RunState.Warmup, RunState.RoundTrain),
    (RunState.Warmup, RunState.Paused),
    (RunState.RoundTrain, RunState.RoundWitness),
    (RunState.RoundWitness, RunState.RoundTrain),
    (RunState.RoundWitness, RunState.Cooldown),
    (RunState.Cooldown, RunState.WaitingForMembers),
    (RunState.Cooldown, RunState.Finished),
    (RunState.Cooldown, RunState.Paused),
    (RunState.Paused, RunState.WaitingForMembers),
    (RunState.Paused, RunState.Finished),
}

PEERS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 3.0])),
        st.tuples(st.just("all witnesses"), st.none()),
        st.tuples(st.just("all witnesses"), st.none()),
        st.tuples(st.sampled_from(["witness", "join", "drop"]), PEERS),
        st.tuples(st.sampled_from(["pause", "resume"]), st.none()),
    ),
    min_size=10,
    max_size=80,
)


def events(state: State, now: float, what: str, detail) -> list:
    """The events of one random step, right or wrong; time is in shares of the state's own."""
    warming = state.run_state == RunState.Warmup
    voice = (lambda p: WarmupWitness(p, now, 7)) if warming else (lambda p: Witness(p, now))
    match what:
        case "tick":
            return [Tick(now, 7 + int(now))]
        case "witness":
            return [voice(detail)]
        case "all witnesses":
            started = state.run_state in (RunState.Warmup, RunState.RoundTrain)
            return [voice(peer) for peer in state.witnesses] if started else []
        case "join":
            return [Join(detail)]
        case "pause":
            return [Pause(now)]
        case "resume":
            return [Resume(now)]


def drop(state: State, peer: int) -> State:
    gone = {PeerRecord(peer, HEALTHY): PeerRecord(peer, DROPPED)}
    return replace(state, peers=tuple(gone.get(record, record) for record in state.peers))


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    steps=STEPS,
    total_steps=st.integers(1, 6),
    witness_nodes=st.integers(0, 2),
    by_time=st.booleans(),
)
def test_no_sequence_of_events_leaves_the_table_or_loses_a_batch(
    steps, total_steps, witness_nodes, by_time
):
    epoch = (
        {"epoch_time": 70, "rounds_per_epoch": None}
        if by_time
        else {"epoch_time": None, "rounds_per_epoch": 2}
    )
    chosen = Settings(total_steps=total_steps, witness_nodes=witness_nodes, **epoch)
    state = replace(waiting(), settings=chosen, data_index=90)
    now, trained = 0.0, []
    for what, detail in steps:
        if what == "drop":
            state = drop(state, detail)
            continue
        if what == "tick" and state.deadline is not None:
            now = max(now, state.since + detail * (state.deadline - state.since))
        for event in events(state, now, what, detail):
            try:
                after = tick(state, event)
            except CoordinatorError:
                continue
            changed = (state.run_state, after.run_state)
            assert changed in TABLE or changed[0] == changed[1]
            assert after.epoch in (state.epoch, state.epoch + 1)
            assert after.step - state.step == (
                state.run_state == RunState.RoundWitness and changed[0] != changed[1]
            )
            assert after.since >= state.since
            if changed[1] == RunState.RoundTrain and changed[0] != changed[1]:
                trained.append((after.step, after.data_index, after.batch_size))
            assert State.from_json(after.to_json(), chosen) == after
            members = [record.peer for record in after.peers if record.state == HEALTHY]
            assert len(set(members + list(after.pending))) == len(members) + len(after.pending)
            state = after
    assert [step for step, _, _ in trained] == list(range(1, len(trained) + 1))
    assert len(trained) <= total_steps
    data_index = 90
    for _, first, size in trained:
        assert first == data_index
        data_index += size
