"""Random sequences of events, right and wrong: what must hold after each of them."""

import random
from collections import Counter

from lockstep.protocol.coordinator import (
    Checkpointed,
    CoordinatorError,
    CoordinatorState,
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
    healthy,
    tick,
)
from tests.lockstep.protocol.three_peers import EJECTED, HEALTHY, Settings, heard, waiting

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
# Of each event, the states in which it may succeed.
ROUND = {RunState.RoundTrain, RunState.RoundWitness}
MEMBERS = set(RunState) - {RunState.Uninitialized, RunState.Finished}
RUNNING = MEMBERS - {RunState.Paused}
ALLOWED = {
    Tick: RUNNING,
    Join: MEMBERS,
    Leave: set(RunState),
    WarmupWitness: {RunState.Warmup},
    WitnessReport: ROUND,
    HealthCheck: {RunState.Warmup, RunState.RoundWitness},
    Eject: ROUND,
    Untrained: {RunState.RoundWitness},
    Checkpointed: {RunState.Cooldown},
    Pause: RUNNING,
    Resume: {RunState.Paused},
}
FIRST_SEQUENCE = 90  # the batch grows from 8 to 16 at 100
COUNT = 5


def chosen(items, bits: int) -> tuple:
    return tuple(item for place, item in enumerate(items) if bits >> place & 1)


def events(state: CoordinatorState, now: float, what: str, detail) -> list:
    """The events of one random step, right or wrong."""

    def voice(peer: int, deaf: int):
        filter = heard(*chosen(range(COUNT), ~deaf))
        if state.run_state == RunState.Warmup:
            return WarmupWitness(peer, now, 7, filter)
        return WitnessReport(peer, now, filter)

    in_round = state.run_state in ROUND
    match what:
        case "tick":
            return [Tick(now, 7 + int(now))]
        case "witness":
            return [voice(*detail)]
        case "all witnesses":
            started = state.run_state in (RunState.Warmup, RunState.RoundTrain)
            return [voice(peer, detail) for peer in state.witnesses] if started else []
        case "join":
            return [Join((detail,))]
        case "all join":
            return [Join((peer,)) for peer in range(COUNT)]
        case "leave":
            return [Leave((detail,), now)]
        case "eject":
            return [Eject((detail,), now)]
        case "health check":
            by, bits = detail
            return [HealthCheck(by, chosen(range(COUNT), bits), now)]
        case "roll call":
            gone = [p for p in range(COUNT) if in_round and not healthy(state, (p,))[0]]
            return [HealthCheck(by, (peer,), now) for by in range(COUNT) for peer in gone]
        case "all leave":
            return [Leave((peer,), now) for peer in range(COUNT)]
        case "untrained":
            spans = sorted(state.plan.spans.values()) if in_round else [(0, 0)]
            return [Untrained(chosen(spans, detail), now)]
        case "checkpoint":
            return [Checkpointed(detail, now, "ab"[detail % 2] * 64)]
        case "pause":
            return [Pause(now)]
        case "resume":
            return [Resume(now)]


class Books:
    """What was applied of all that was given out."""

    def __init__(self):
        self.applied: set[int] = set()
        self.rounds = 0

    def close(self, before: CoordinatorState, after: CoordinatorState) -> None:
        """Enter a finished round: none of its sequences is applied twice, and none is lost."""
        given_out = sequences(before.plan.spans.values())
        agreed = len(before.spoken) >= before.quorum
        missed = sequences(before.missed or ()) if agreed else given_out
        trained = [index for index in given_out if index not in missed]
        assert not self.applied & set(trained)
        self.applied |= set(trained)
        waits = sequences(after.untrained)
        everything = list(range(FIRST_SEQUENCE, after.data_index))
        assert sorted([*self.applied, *waits]) == everything
        self.rounds += 1


def sequences(spans) -> list[int]:
    return [index for first, last in spans for index in range(first, last + 1)]


def check_transition(before: CoordinatorState, event, after: CoordinatorState) -> None:
    changed = (before.run_state, after.run_state)
    finished = changed[0] == RunState.RoundWitness != changed[1]
    assert before.run_state in ALLOWED[type(event)]
    assert changed in TABLE or changed[0] == changed[1]
    assert after.step == before.step + finished
    cooled = changed[0] == RunState.Cooldown != changed[1]
    assert after.epoch == before.epoch + cooled
    assert after.since >= before.since
    if not finished:
        assert (after.data_index, after.untrained) == (before.data_index, before.untrained)
    if changed[1] == RunState.RoundTrain != changed[0]:
        assert {record.state for record in after.peers} == {HEALTHY}
        assert len(after.peers) >= after.settings.min_clients
        assert after.spoken == after.participants == () and after.missed is None
    elif changed[0] in ROUND and not finished:
        assert after.plan == before.plan and after.witnesses == before.witnesses
    assert after.ejected[: len(before.ejected)] == before.ejected


def check_state(state: CoordinatorState) -> None:
    members = [record.peer for record in state.peers if record.state == HEALTHY]
    assert len(set(members + list(state.pending))) == len(members) + len(state.pending)
    assert not set(state.ejected) & {*members, *state.pending}
    for record in state.peers + state.exited:
        assert (record.state == EJECTED) <= (record.peer in state.ejected)
    assert len(state.spoken) == len(state.participants)
    assert (state.checkpoint is None) == (state.checkpointer is None)
    assert (state.run_state == RunState.Finished) <= (state.step == state.settings.total_steps + 1)
    trains = state.run_state in (RunState.Warmup, *ROUND)
    assert trains <= (state.step <= state.settings.total_steps)


def walk(settings: Settings, steps: list) -> Counter:
    """Take the steps; return how often each event was accepted or refused, and each transition."""
    state = waiting(settings=settings, data_index=FIRST_SEQUENCE)
    books, seen, now = Books(), Counter(), 0
    for what, detail in steps:
        if what == "tick" and state.deadline is not None:
            # Time is in shares of the state's own.
            now = max(now, state.since + detail * (state.deadline - state.since))
        for event in events(state, now, what, detail):
            try:
                after = tick(state, event)
            except CoordinatorError:
                seen[type(event), "refused"] += 1
                continue
            seen[type(event), "accepted"] += after != state
            check_transition(state, event, after)
            check_state(after)
            if after.step > state.step:
                books.close(state, after)
            seen[state.run_state, after.run_state] += 1
            seen["given out again"] += bool(state.untrained) and after.step > state.step
            state = after
    assert state.step == 1 + books.rounds <= 1 + settings.total_steps
    return seen


def run(total_steps: int, witness_nodes: int, verification_percent: int, by_time: bool) -> Settings:
    return Settings(
        total_steps=total_steps,
        witness_nodes=witness_nodes,
        verification_percent=verification_percent,
        epoch_time=70 if by_time else None,
        rounds_per_epoch=None if by_time else 2,
    )


def test_no_walk_leaves_the_table_or_loses_a_sequence_and_each_event_is_seen_both_ways():
    draw, seen = random.Random(0), Counter()
    for _ in range(300):
        steps = [random_step(draw) for _ in range(100)]
        seen += walk(
            run(draw.randint(1, 6), draw.randint(0, 2), draw.choice([0, 40]), draw.random() < 0.5),
            steps,
        )
    assert seen.keys() >= TABLE
    assert {(event, how) for event in ALLOWED for how in ("accepted", "refused")} <= seen.keys()
    assert seen["given out again"] > 100


def random_step(draw: random.Random) -> tuple:
    """What happens next, right or wrong; rounds come to an end more often than not."""
    peer, bits = draw.randrange(COUNT), draw.getrandbits(COUNT)
    rare = draw.choice(
        [("pause", None), ("leave", peer), ("all leave", None), ("eject", peer)]
        + [("tick", draw.choice([0.0, 0.5, 3.0])), ("health check", (peer, bits))]
    )
    return draw.choice(
        [
            ("tick", 1.0),
            ("tick", 1.0),
            ("tick", 1.0),
            ("all witnesses", 1 << peer),
            ("all witnesses", 0),
            ("untrained", bits),
            ("witness", (peer, bits)),
            ("health check", (peer, 1 << draw.randrange(COUNT))),
            ("roll call", None),
            ("checkpoint", peer),
            ("join", peer),
            ("all join", None),
            ("resume", None),
            rare if draw.random() < 0.3 else ("tick", 1.0),
        ]
    )
