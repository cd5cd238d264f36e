"""What each event makes of a state, and which a state refuses, each in a line that names both."""

from dataclasses import replace
from functools import partial

import pytest

from lockstep.protocol import committee, sets
from lockstep.protocol.coordinator import (
    Checkpointed,
    ClientState,
    CoordinatorError,
    CoordinatorState,
    Eject,
    Event,
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
from tests.lockstep.protocol.three_peers import (
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

UNINITIALIZED, WAITING, WARMUP, TRAIN, WITNESS, COOLDOWN, FINISHED, PAUSED = RunState
warmup, train = partial(at, WARMUP), partial(at, TRAIN)
witness, cooldown = partial(at, WITNESS), partial(at, COOLDOWN)
BY_TIME = Settings(epoch_time=60, rounds_per_epoch=None)
ONE_GONE = (*records(0, 1), *records(2, state=DROPPED))
TWO_GONE = (*records(0), *records(1, 2, state=DROPPED))
LIED = (*records(0, 1), *records(2, state=EJECTED))
ONE_HEARD = {"spoken": BOTH, "participants": (heard(FIRST), heard(FIRST))}


def row(before: CoordinatorState, event: Event, **expected: object) -> tuple:
    """A state, an event, and what is so afterwards; where nothing is said, the whole state is."""
    return before, event, expected


TRANSITIONS = {
    "waiting: enough members and the extra time over": row(
        waiting(step=7, exited=records(9), checkpoint="1" * 64, checkpointer=4), Tick(10, SEED),
        run_state=WARMUP, since=10, epoch_start=10, height=0, seed=SEED, peers=records(0, 1, 2),
        pending=(), exited=(), spoken=(), participants=(), checkpoint=None, checkpointer=None),
    "waiting: an epoch takes 256 peers": row(
        waiting(pending=tuple(range(300))), Tick(10, SEED), peers=records(*range(256)),
        pending=tuple(range(256, 300))),
    "waiting: extra time not over": row(waiting(), Tick(9.5, SEED)),
    "waiting: too few members": row(waiting(pending=(0, 1)), Tick(99, SEED)),
    "waiting: a peer joins": row(waiting(), Join((3,)), pending=(0, 1, 2, 3)),
    "warm-up: timeout": row(
        warmup(spoken=(FIRST,)), Tick(120, 7), run_state=TRAIN, since=120, seed=7, spoken=(), step=1
    ),
    "warm-up: not over": row(warmup(), Tick(119, 7)),
    "warm-up: none": row(
        warmup(settings=Settings(warmup_time=0)), Tick(100, 7), run_state=TRAIN),
    "warm-up: first of two witnesses": row(
        warmup(), WarmupWitness(FIRST, 101, 7, ALL), run_state=WARMUP, spoken=(FIRST,),
        participants=(ALL,), since=100, seed=SEED),
    "warm-up: all witnesses, early": row(
        warmup(spoken=(FIRST,), participants=(ALL,)), WarmupWitness(SECOND, 103, 7, ALL),
        run_state=TRAIN, since=103, seed=7, spoken=(), participants=()),
    "warm-up: one peer gone, enough left": row(
        warmup(peers=ONE_GONE), Tick(120, 7), run_state=TRAIN, peers=records(0, 1),
        exited=ONE_GONE[2:]),
    "warm-up: too few left, before any time is over": row(
        warmup(peers=TWO_GONE, pending=(5,), epoch=3), Tick(101, 7), run_state=WAITING, since=101,
        peers=(), pending=(0, 5), exited=TWO_GONE[1:], epoch=3, step=1),
    "warm-up: too few left when the last witness speaks": row(
        warmup(peers=TWO_GONE, spoken=(FIRST,)), WarmupWitness(SECOND, 103, 7, ALL),
        run_state=WAITING, pending=(0,)),
    "warm-up: too few left, and nothing left to train": row(
        warmup(peers=TWO_GONE, step=101), Tick(101, 7), run_state=FINISHED, since=101),
    "train: timeout": row(
        train(spoken=(FIRST,)), Tick(130, 7), run_state=WITNESS, since=130, spoken=(FIRST,), step=1
    ),
    "train: not over": row(train(), Tick(129, 7)),
    "train: first of two witnesses": row(
        train(), WitnessReport(SECOND, 110, ALL), run_state=TRAIN, spoken=(SECOND,),
        participants=(ALL,), since=100),
    "train: all witnesses, early": row(
        train(spoken=(SECOND,), participants=(heard(SECOND),)), WitnessReport(FIRST, 111, ALL),
        run_state=WITNESS, since=111, spoken=(SECOND, FIRST), participants=(heard(SECOND), ALL)),
    "witness: a witness speaks late": row(
        witness(spoken=(FIRST,)), WitnessReport(SECOND, 101, ALL), run_state=WITNESS, since=100,
        spoken=BOTH),
    "witness: not over": row(witness(spoken=BOTH), Tick(101, 7)),
    "witness: next round": row(
        witness(spoken=BOTH, participants=(ALL, ALL), missed=(), step=5, data_index=96, height=1),
        Tick(102, 7), run_state=TRAIN, since=102, step=6, data_index=104, height=2, seed=7,
        spoken=(), participants=(), missed=None, untrained=(), epoch=0),
    "witness: the ramp is read where the batch begins": row(
        witness(spoken=BOTH, data_index=104), Tick(102, 7), data_index=120),
    "witness: the epoch's rounds are over": row(
        witness(spoken=BOTH, height=3), Tick(102, 7), run_state=COOLDOWN, height=4, step=2,
        data_index=8),
    "witness: the epoch's time is not over": row(
        witness(settings=BY_TIME, spoken=BOTH, height=99), Tick(109, 7), run_state=TRAIN),
    "witness: the epoch's time is over": row(
        witness(settings=BY_TIME, spoken=BOTH), Tick(110, 7), run_state=COOLDOWN, step=2,
        data_index=8),
    "witness: nobody spoke": row(
        witness(), Tick(102, 7), run_state=COOLDOWN, peers=(),
        exited=records(0, 1, 2, state=WITHDRAWN), step=2),
    "witness: fewer spoke than the quorum of those elected": row(
        witness(settings=EVERYONE, spoken=(FIRST,)), Tick(102, 7), run_state=COOLDOWN,
        peers=records(0, 1, 2)),
    "witness: the quorum of those elected spoke": row(
        witness(settings=EVERYONE, spoken=BOTH), Tick(102, 7), run_state=TRAIN),
    "witness: one peer gone, enough left": row(
        witness(peers=ONE_GONE, spoken=BOTH), Tick(102, 7), run_state=TRAIN, peers=records(0, 1),
        exited=ONE_GONE[2:]),
    "witness: fewer than min_clients left": row(
        witness(peers=TWO_GONE, spoken=BOTH), Tick(102, 7), run_state=COOLDOWN, peers=records(0)),
    "witness: before the last step": row(
        witness(spoken=BOTH, step=99), Tick(102, 7), run_state=TRAIN, step=100),
    "witness: the last step": row(
        witness(spoken=BOTH, step=100), Tick(102, 7), run_state=COOLDOWN, step=101),
    "cooldown: not over": row(cooldown(), Tick(104, 7)),
    "cooldown: next epoch, members stay ahead of newcomers": row(
        cooldown(step=9, data_index=64, pending=(5,)), Tick(105, 7), run_state=WAITING, since=105,
        epoch=1, step=9, data_index=64, peers=(), pending=(0, 1, 2, 5)),
    "cooldown: a peer that is gone does not stay": row(
        cooldown(peers=ONE_GONE), Tick(105, 7), pending=(0, 1), exited=ONE_GONE[2:]),
    "cooldown: the last step is done": row(
        cooldown(step=101), Tick(105, 7), run_state=FINISHED, since=105, epoch=1),
    "cooldown: the last step is not done": row(cooldown(step=100), Tick(105, 7), run_state=WAITING),
    "cooldown: the first checkpoint": row(
        cooldown(), Checkpointed(1, 101, "a" * 64), checkpoint="a" * 64, checkpointer=1,
        run_state=COOLDOWN),
    "cooldown: the same checkpoint from another": row(
        cooldown(checkpoint="a" * 64, checkpointer=1), Checkpointed(2, 101, "a" * 64)),
    "cooldown: the checkpoint stays until the next epoch": row(
        cooldown(checkpoint="a" * 64, checkpointer=1), Tick(105, 7), run_state=WAITING,
        checkpoint="a" * 64, checkpointer=1),
    "join: during an epoch, for the next": row(
        train(), Join((7,)), run_state=TRAIN, pending=(7,), peers=records(0, 1, 2)),
    "join: a dropped peer comes back": row(
        train(peers=ONE_GONE), Join((2,)), pending=(2,), peers=ONE_GONE),
    "join: while paused": row(at(PAUSED, peers=()), Join((0,)), pending=(0,)),
    "join: a peer that left": row(
        train(peers=(*records(0, 1), *records(2, state=WITHDRAWN))), Join((2,)), pending=(2,)),
    "leave: a member keeps its place until the round is over": row(
        train(), Leave((1,), 101), peers=(*records(0), *records(1, state=WITHDRAWN), *records(2)),
        exited=(), witnesses=BOTH, trainers=(0, 1, 2)),
    "leave: before the epoch": row(waiting(), Leave((1,), 1), pending=(0, 2)),
    "leave: before the next epoch, a peer that had been dropped": row(
        train(peers=ONE_GONE, pending=(2, 7)), Leave((2,), 101), pending=(7,), peers=ONE_GONE),
    "health check: a peer that one of two witnesses heard": row(
        witness(spoken=BOTH, participants=(ALL, heard(*BOTH))),
        HealthCheck(FIRST, (OTHER,), 101),
        run_state=WITNESS,
        peers=tuple(
            replace(record, state=DROPPED) if record.peer == OTHER else record
            for record in records(0, 1, 2)
        ),
        witnesses=BOTH,
    ),
    "health check: a witness that the quorum did not hear": row(
        witness(settings=EVERYONE, spoken=(0, 1), participants=(heard(0, 1),) * 2),
        HealthCheck(0, (2,), 101), peers=ONE_GONE),
    "health check: two peers": row(
        witness(settings=EVERYONE, spoken=(0, 1), participants=(heard(0),) * 2),
        HealthCheck(1, (1, 2), 101), peers=TWO_GONE),
    "health check: in a warm-up": row(
        warmup(settings=EVERYONE, spoken=(0, 1), participants=(heard(0, 1),) * 2),
        HealthCheck(0, (2,), 101), run_state=WARMUP, peers=ONE_GONE),
    "eject: train": row(
        train(ejected=(9,)), Eject((2,), 101), run_state=TRAIN,
        peers=(*records(0, 1), *records(2, state=EJECTED)), ejected=(9, 2), trainers=(0, 1, 2),
        witnesses=BOTH),
    "eject: witness": row(
        witness(), Eject((0,), 101), peers=(*records(0, state=EJECTED), *records(1, 2)),
        ejected=(0,)),
    "witness: an ejected peer goes": row(
        witness(peers=(*records(0, 1), *records(2, state=EJECTED)), ejected=(2,), spoken=BOTH),
        Tick(102, 7), peers=records(0, 1), exited=records(2, state=EJECTED), ejected=(2,)),
    "cooldown: a peer that left does not stay": row(
        cooldown(peers=(*records(0, 1), *records(2, state=WITHDRAWN))), Tick(105, 7), pending=(0, 1)
    ),
    "witness: a pause is pending": row(
        witness(spoken=BOTH, pending_pause=True), Tick(102, 7), run_state=COOLDOWN,
        pending_pause=True),
    "cooldown: a pause is pending": row(
        cooldown(pending_pause=True), Tick(105, 7), run_state=PAUSED, since=105, epoch=1,
        pending_pause=False, peers=(), exited=records(0, 1, 2, state=WITHDRAWN)),
    "pause: waiting": row(waiting(), Pause(3), run_state=PAUSED, since=3, pending=(0, 1, 2)),
    "pause: warm-up": row(
        warmup(), Pause(101), run_state=PAUSED, peers=(), exited=records(0, 1, 2, state=WITHDRAWN)
    ),
    "pause: warm-up, when one peer was gone before": row(
        warmup(peers=ONE_GONE), Pause(101),
        exited=(*records(0, 1, state=WITHDRAWN), *records(2, state=DROPPED))),
    "pause: train": row(train(), Pause(101), run_state=TRAIN, pending_pause=True, since=100),
    "pause: witness": row(witness(), Pause(101), pending_pause=True),
    "pause: cooldown": row(cooldown(), Pause(101), pending_pause=True),
    "resume": row(
        at(PAUSED, peers=(), pending=(4,)), Resume(101), run_state=WAITING, since=101, pending=(4,)
    ),
    "resume: nothing left to train": row(
        at(PAUSED, peers=(), step=101), Resume(101), run_state=FINISHED),
    "untrained: said": row(
        witness(), Untrained((SPANS[1], SPANS[0]), 101), missed=(SPANS[1], SPANS[0]), untrained=(),
        data_index=0),
    "untrained: nothing is": row(witness(), Untrained((), 101), missed=()),
    "witness: what was untrained waits for the next round": row(
        witness(spoken=BOTH, missed=(SPANS[1],)), Tick(102, 7), untrained=(SPANS[1],), missed=None,
        data_index=8),
    "witness: what found no place waits before what is untrained now": row(
        witness(spoken=BOTH, data_index=50, untrained=((0, 29),), missed=((3, 5),)), Tick(102, 7),
        untrained=((6, 29), (3, 5)), data_index=52),
    "witness: without a quorum everything is untrained": row(
        witness(spoken=(FIRST,), missed=(SPANS[1],)), Tick(102, 7),
        untrained=tuple(sorted(SPANS.values())), data_index=8),
}  # fmt: skip


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    before, event, expected = row
    after = tick(before, event)
    found = {name: getattr(after, name) for name in expected}
    assert (found, after) == (expected, after if expected else before)


REFUSED = {
    "tick: uninitialized": (at(UNINITIALIZED), Tick(101, 7), "halted"),
    "tick: earlier than the state": (warmup(), Tick(99, 7), "began at 100"),
    "join: finished": (at(FINISHED), Join((7,)), "takes no members"),
    "join: uninitialized": (at(UNINITIALIZED), Join((7,)), "takes no members"),
    "join: twice": (waiting(), Join((1,)), "member already"),
    "join: a member": (cooldown(), Join((1,)), "member already"),
    "warm-up witness: in a round": (train(), WarmupWitness(FIRST, 101, 7, ALL), "expected Warmup"),
    "warm-up witness: not elected": (
        warmup(), WarmupWitness(OTHER, 101, 7, ALL), "the witnesses are"),
    "witness: in warm-up": (warmup(), WitnessReport(FIRST, 101, ALL), "expected RoundTrain or"),
    "witness: not elected": (train(), WitnessReport(OTHER, 101, ALL), "the witnesses are"),
    "witness: twice": (train(spoken=(FIRST,)), WitnessReport(FIRST, 101, ALL), "spoken already"),
    "pause: finished": (at(FINISHED), Pause(101), "halted already"),
    "resume: running": (train(), Resume(101), "not paused"),
    "join: ejected long ago": (waiting(ejected=(5,)), Join((5,)), "was ejected"),
    "leave: a stranger": (train(), Leave((7,), 101), "not a member"),
    "leave: twice": (train(peers=ONE_GONE), Leave((2,), 101), "not a member"),
    "leave: earlier than the state": (train(), Leave((1,), 99), "began at 100"),
    "health check: in training": (
        train(**ONE_HEARD), HealthCheck(FIRST, (OTHER,), 101), "expected Warmup or RoundWitness"),
    "health check: by a peer that is not a witness": (
        witness(**ONE_HEARD), HealthCheck(OTHER, (OTHER,), 101), "the witnesses are"),
    "health check: before a quorum spoke": (
        witness(spoken=(FIRST,), participants=(heard(FIRST),)), HealthCheck(FIRST, (OTHER,), 101),
        "1 witnesses spoke, expected 2"),
    "health check: a stranger": (
        witness(**ONE_HEARD), HealthCheck(FIRST, (OTHER, 7), 101), "peer 7 is not a member"),
    "health check: a peer that is dropped already": (
        witness(peers=ONE_GONE, **ONE_HEARD), HealthCheck(FIRST, (2,), 101),
        "peer 2 is not a member"),
    "health check: a healthy peer": (
        witness(spoken=BOTH, participants=(ALL, ALL)), HealthCheck(FIRST, (OTHER,), 101),
        f"peer {OTHER} is healthy"),
    "health check: a healthy peer beside one that is gone": (
        witness(spoken=BOTH, participants=(ALL, heard(*BOTH))),
        HealthCheck(FIRST, (OTHER, SECOND), 101), f"peer {SECOND} is healthy"),
    "health check: a peer that the quorum heard, though not all": (
        witness(settings=EVERYONE, spoken=(0, 1, 2), participants=(ALL, ALL, heard(0))),
        HealthCheck(0, (2,), 101), "peer 2 is healthy"),
    "eject: in warm-up": (warmup(), Eject((1,), 101), "expected RoundTrain or RoundWitness"),
    "eject: a stranger": (train(), Eject((7,), 101), "not a member"),
    "eject: twice": (witness(peers=LIED, ejected=(2,)), Eject((2,), 101), "not a member"),
    "untrained: while training": (train(), Untrained((SPANS[0],), 101), "expected RoundWitness"),
    "untrained: said already that nothing is": (
        witness(missed=()), Untrained((SPANS[1],), 101), "known already"),
    "untrained: a part of a span": (
        witness(), Untrained((SPANS[0], (SPANS[1][0], SPANS[1][0])), 101),
        "not one of the round's spans"),
    "untrained: a span twice": (
        witness(), Untrained((SPANS[0], SPANS[0]), 101), "or is there twice"),
    "checkpointed: in a round": (witness(), Checkpointed(1, 101, "a" * 64), "expected Cooldown"),
    "checkpointed: a peer that is gone": (
        cooldown(peers=ONE_GONE), Checkpointed(2, 101, "a" * 64), "not a member"),
    "checkpointed: other params than the first": (
        cooldown(checkpoint="a" * 64, checkpointer=1), Checkpointed(2, 101, "b" * 64),
        "peer 1 stored aaaa"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_event_is_refused_with_the_state_and_the_event(row):
    state, event, reason = row
    with pytest.raises(CoordinatorError, match=reason) as refusal:
        tick(state, event)
    message = str(refusal.value)
    assert state.run_state.name in message and repr(event) in message and "\n" not in message


def test_participant_is_pinned():
    assert sets.participant(258).hex().startswith("7255b3ce83a75f4d")


# ---- What a state says of itself ----


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
