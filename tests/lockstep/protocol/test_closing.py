"""Rounds that close before everybody is there: what is late travels on, is merged once or given out
again, and all of it follows from what was sent."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lockstep.protocol import committee, consensus, driver, links
from lockstep.protocol.closing import Closing, OnItsWay, QuorumClosing, age_of, slot, steps_of
from lockstep.protocol.coordinator import Close, CoordinatorError, RunState, TravelOn, tick
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Decision, Evidence, Message, Round, Travelling
from lockstep.tables.links import Links
from lockstep.transcript.entry import Entry
from lockstep.transcript.recomputed import begin_round, finish_round
from tests.lockstep.protocol import records, three_peers
from tests.lockstep.protocol.driver import driven_run
from tests.lockstep.protocol.driver.driven_run import Settings, commitment
from tests.lockstep.protocol.three_peers import at

ENDLESS = Settings(init_min_clients=4, min_clients=3, rounds_per_epoch=100, batch=16)
ALL = three_peers.CLOSING
QUORUM = QuorumClosing(
    **vars(ALL), quorum=3, grace_seconds=0.5, max_age=2, fragments=1, rows=2, steps=(2, 2, 2, 1),
    settle_every=0, last=0,
)  # fmt: skip


def begun(closing: Closing = QUORUM, settings: Settings = ENDLESS, count: int = 4) -> RunProgress:
    return driven_run.begun(settings, count, closing=closing)


def evidence(progress: RunProgress, round_: Round, *given: object, **said: object) -> Evidence:
    """What was sent, and what honest witnesses say of it once the round has closed."""
    return driven_run.evidence(round_, *given, closing=progress.state.closing, **said)


def take(
    progress: RunProgress, *told: Mapping[int, float | None]
) -> tuple[list[Round], list[Decision], RunProgress]:
    """Some rounds, with the arrivals of each."""
    rounds, decisions = [], []
    for arrivals in told:
        progress, round_ = driver.next_round(progress)
        said = evidence(progress, round_, arrivals)
        progress, decision = driver.finish_round(progress, round_, said)
        rounds.append(round_)
        decisions.append(decision)
    return rounds, decisions, progress


def test_a_round_closes_at_its_kth_arrival_and_a_grace():
    times = {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.4}
    _, (decision,), _ = take(begun(), times)
    assert decision.applied == (0, 1, 2, 3)
    assert decision.train_seconds == 3.4  # the last one was there before the grace was over
    _, (decision,), _ = take(begun(), times | {3: 9.0})
    assert (decision.applied, decision.travelling) == ((0, 1, 2), (3,))
    assert (decision.train_seconds, decision.late) == (3.5, ())


@pytest.mark.parametrize("overlapped, grace, there", [(0.2, 0, 2), (0.1, 0, 1), (0.1, 0.1, 2)])
def test_without_grace_a_round_waits_only_while_peers_train_on_anyway(overlapped, grace, there):
    """Peer 1's message takes 0.15 seconds, after a training of one."""
    speeds = Links(
        tokens_per_second=100, latency_seconds=0, upload_mbps=(1e6, 0.08), download_mbps=1e6
    )
    arrivals = links.arrivals(speeds, [0, 1], {0: 100, 1: 100}, {0: 1500, 1: 1500}, overlapped)
    _, round_ = driver.next_round(
        begun(count=2, settings=replace(ENDLESS, init_min_clients=2, min_clients=2))
    )
    said = records.evidence({}, arrivals=arrivals)
    closes = replace(QUORUM, quorum=1, grace_seconds=grace).closes(round_, said)
    assert len(consensus.in_time(arrivals, closes)) == there
    assert closes == pytest.approx(1.0 + grace, abs=1e-6)


def test_who_is_late_trains_on_and_each_of_its_messages_is_merged_when_it_is_there():
    """A round lasts 3.5 seconds here, of which 2 are the witnesses'."""
    rounds, decisions, progress = take(begun(), {3: 8.0}, {}, {}, {})
    assert decisions[0].travelling == (3,) and decisions[0].train_seconds == 1.5
    first, old, older = rounds[0].assignment[3], slot(3, 1), slot(3, 2)
    one = Travelling(1, first, commitment(rounds[0], 3), 8.0 - 3.5)
    assert rounds[1].travelling == {old: one} and rounds[1].assignment[3] != first
    assert [round_.batch_size for round_ in rounds] == [14] * 4
    assert (decisions[1].applied, decisions[1].travelling) == ((0, 1, 2, 3), (old,))
    assert {*rounds[2].travelling} == {older} and rounds[2].travelling[older].seconds == 1.0
    assert (decisions[2].applied, decisions[2].travelling) == ((0, 1, 2, 3, older), ())
    assert rounds[2].spans[older] == first and rounds[2].sequences[older] == 2
    assert rounds[2].origin(older) == (3, 1) and rounds[2].origin(3) == (3, 3)
    assert not rounds[3].travelling and not progress.state.untrained


def test_an_older_message_closes_no_round_also_where_all_are_late():
    closing = replace(QUORUM, quorum=1)
    rounds, decisions, _ = take(begun(closing), {3: 2.0}, {}, {})
    assert rounds[1].travelling[slot(3, 1)].seconds == 0.0
    assert (decisions[1].train_seconds, decisions[1].applied) == (1.0, (0, 1, 2, 3, slot(3, 1)))
    closing = replace(closing, grace_seconds=0.0)
    far = dict.fromkeys(range(4), 9.0) | {0: 8.0}
    rounds, decisions, _ = take(begun(replace(closing, quorum=4)), far)
    assert decisions[0].train_seconds == 9.0
    rounds, decisions, _ = take(begun(closing), {0: 31.0, 1: 32.0, 2: 31.0, 3: 31.0}, {})
    assert {*rounds[1].assignment} == {*range(4)}
    assert {*rounds[1].travelling} == {slot(peer, 1) for peer in range(4)}
    assert decisions[0].train_seconds == 30.0 and len(decisions[1].applied) == 8


def test_one_that_is_too_old_is_recorded_as_late_and_its_sequences_go_out_again():
    rounds, decisions, _ = take(begun(), {3: 99.0}, {}, {}, {})
    assert [decision.travelling for decision in decisions] == [(3,), (slot(3, 1),), (), ()]
    assert [decision.late for decision in decisions] == [(), (), (slot(3, 2),), ()]
    assert [decision.applied for decision in decisions[1:]] == [(0, 1, 2, 3)] * 3
    assert rounds[0].assignment[3] in [
        (first, first + 1) for first, _ in rounds[3].assignment.values()
    ]


def test_a_peer_that_is_gone_after_it_sent_counts_still_and_once():
    progress, round_ = driver.next_round(begun())
    progress, _ = driver.finish_round(progress, round_, evidence(progress, round_, {3: 4.0}))
    applied = []
    for _ in range(3):
        progress, round_ = driver.next_round(progress)
        silent = (3,) if 3 in round_.peers else ()
        said = evidence(progress, round_, silent=silent)
        progress, decision = driver.finish_round(progress, round_, said)
        applied.append(slot(3, 1) in decision.applied)
        assert decision.dropped == silent
    assert applied == [True, False, False]


def test_a_late_message_waits_for_the_turn_of_its_fragment_and_its_peer_does_not():
    """Rounds exchange fragments 0, 1 and 2 in turns, and last 3 seconds."""
    closing = replace(QUORUM, fragments=3)
    rounds, decisions, _ = take(begun(closing), {3: 5.0}, {}, {3: 5.0}, {}, {})
    assert all(3 in round_.assignment for round_ in rounds)
    assert [{*round_.travelling} for round_ in rounds] == [set(), set(), set(), {slot(3, 1)}, set()]
    assert [3 in decision.applied for decision in decisions] == [False, True, False, True, True]
    assert decisions[3].applied == (0, 1, 2, 3, slot(3, 1))
    closing = replace(closing, settle_every=3, last=9)  # which comes before the fragment's turn
    _, (decision, *_), _ = take(begun(closing), {3: 5.0})
    assert (decision.late, decision.travelling) == ((3,), ())


def test_several_messages_of_a_peer_may_be_on_their_way():
    closing = replace(QUORUM, fragments=3)
    _, _, progress = take(begun(closing), {3: 5.0}, {}, {3: 5.0})
    assert [(one.peer, one.step) for one in progress.state.on_their_way] == [(3, 1), (3, 3)]
    rounds, decisions, _ = take(begun(), {3: 8.0}, {3: 8.0}, {})  # and of one fragment
    assert {*rounds[2].travelling} == {slot(3, 1), slot(3, 2)}
    assert decisions[2].applied == (0, 1, 2, 3, slot(3, 2))


def test_a_round_that_settles_waits_for_all_and_lets_nothing_travel_on():
    closing = replace(QUORUM, settle_every=2, last=10)
    rounds, decisions, _ = take(begun(closing), {3: 9.0}, {1: 20.0}, {3: 31.0}, {3: 31.0})
    assert decisions[0].travelling == (3,)
    assert (decisions[1].applied, decisions[1].train_seconds) == ((0, 1, 2, 3, slot(3, 1)), 20.0)
    assert not rounds[2].travelling and decisions[2].travelling == (3,)
    assert (decisions[3].applied, decisions[3].late) == ((0, 1, 2, slot(3, 1)), (3,))
    _, (_, decision), _ = take(begun(closing), {}, {3: 31.0})
    assert (decision.late, decision.travelling, decision.train_seconds) == ((3,), (), 30.0)
    assert [closing.travels_on(step, 0) for step in (1, 2, 9, 10)] == [True, False, True, False]
    assert QUORUM.travels_on(10, 0)


@dataclass(frozen=True, kw_only=True)
class ShareOfBytes(Closing):
    """A round closes when so large a share of what was sent has arrived."""

    waits_for_all = False
    share_of_bytes: float

    def closes(self, round_: Round, evidence: Evidence) -> float:
        sent = sum(message.bytes for message in evidence.messages.values())
        there = 0
        for peer in sorted(evidence.arrivals, key=evidence.arrivals.__getitem__):
            there += evidence.messages[peer].bytes
            if there >= self.share_of_bytes * sent:
                return min(self.limit, evidence.arrivals[peer])
        return self.limit


def test_another_way_to_close_a_round_is_another_class_and_nothing_else():
    """Of 10 bytes 8 are there after 3 seconds, without peer 3's; and an audit follows it."""
    sizes, times = {0: 1, 1: 5, 2: 2, 3: 2}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    closing = ShareOfBytes(**vars(ALL), share_of_bytes=0.8)
    for lost, seconds, late in ({}, 3.0, (3,)), ({2: None, 3: None}, 30.0, (2, 3)):
        start = driven_run.started(ENDLESS, 4, closing=closing)
        progress, round_ = driver.next_round(driver.ask(start, range(4)))
        sent = {p: Message(commitment(round_, p), size) for p, size in sizes.items()}
        there = {peer: at for peer, at in times.items() if peer not in lost}
        said = records.evidence(sent, arrivals=there)
        attestations = consensus.witnessed(round_, said, closing.closes(round_, said))
        said = replace(said, attestations=attestations)
        progress, decision = driver.finish_round(progress, round_, said)
        assert (decision.train_seconds, decision.late) == (seconds, late)
        assert {*decision.applied} == {*range(4)} - {*late}
        entry = records.entry(round_, said, decision, asked=tuple(range(4)))
        assert finish_round(begin_round(start, entry), entry) == progress


def test_a_quorum_of_all_without_grace_is_a_round_that_waits_for_all():
    """Of as many messages as can be there; what never arrives is waited for."""
    for times in ({1: 29.0}, {2: None}, {0: 31.0, 1: 31.0}):
        all_four = replace(QUORUM, quorum=4, grace_seconds=0.0, max_age=0, rows=4, steps=(1,) * 4)
        decisions = [take(begun(closing), times)[1] for closing in (all_four, ALL)]
        assert decisions[0] == decisions[1]


def test_the_order_of_arrivals_changes_nothing():
    times = {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}
    progress, round_ = driver.next_round(begun())
    found = []
    for order in (times, dict(reversed(times.items()))):
        said = evidence(progress, round_, order)
        said = replace(said, arrivals=order, messages={p: said.messages[p] for p in order})
        found.append(driver.finish_round(progress, round_, said))
    assert found[0] == found[1]


def test_refused_and_second_messages_do_not_travel():
    progress, round_ = driver.next_round(begun())
    other = Message("cd" * 32, 1, to=round_.witnesses[:1])
    for said in ({"refused": (3,)}, {"others": {3: other}}):
        found = evidence(progress, round_, {3: 9.0}, **said)
        _, decision = driver.finish_round(progress, round_, found)
        assert (decision.late, decision.travelling) == ((3,), ())


def test_a_witness_that_claims_to_hold_what_still_travels_lies():
    progress, round_ = driver.next_round(begun())
    honest = evidence(progress, round_, {3: 9.0})
    everything = evidence(progress, round_, {3: 1.0})
    words = (everything.attestations[0], *honest.attestations[1:])
    _, decision = driver.finish_round(progress, round_, replace(honest, attestations=words))
    assert decision.ejected == {words[0].witness: "false witness"}


def test_slower_peers_take_fewer_local_steps_and_none_takes_none():
    assert steps_of([10.0, 5.0, 7.4, 0.1], 8) == (8, 4, 5, 1)
    assert steps_of([0.1 * 3, 0.1, 0.2], 3) == (3, 1, 2)  # 0.1 / (0.1 * 3) * 3 is below 1


def test_a_ramp_of_batches_is_one_of_local_steps():
    closing = replace(QUORUM, rows=3, steps=(8, 4, 1, 1), most_rows=96)
    found = [
        [closing.share(peer, batch, 4) // 3 for peer in range(4)] for batch in (12, 48, 60, 96)
    ]
    assert found == [[1, 1, 1, 1], [4, 2, 1, 1], [5, 2, 1, 1], [8, 4, 1, 1]]


def test_each_peer_has_its_share_and_what_was_not_trained_comes_first_in_whole_steps():
    shares = {0: 4, 1: 2, 2: 4, 3: 2}
    found = committee.plan_shares(shares, 1, 100, [(0, 3), (10, 11)])
    sizes = {peer: last - first + 1 for peer, (first, last) in found.spans.items()}
    assert all(sizes[peer] <= shares[peer] for peer in shares)
    given = sorted(i for first, last in found.spans.values() for i in range(first, last + 1))
    waiting = [i for first, last in found.waiting for i in range(first, last + 1)]
    new = [i for i in given if i >= 100]
    assert sorted([*given, *waiting]) == [0, 1, 2, 3, 10, 11, *new]
    assert new == list(range(100, 100 + found.fresh)) and all(
        size % 2 == 0 for size in sizes.values()
    )
    assert committee.plan_shares({}, 1, 100, [(0, 3)]) == ({}, 0, ((0, 3),))


def test_a_run_that_waits_for_all_neither_closes_early_nor_lets_anything_travel():
    state = at(RunState.RoundTrain)
    with pytest.raises(CoordinatorError, match="rounds of this run wait for all messages"):
        tick(state, Close(state.since))
    one = OnItsWay(0, 1, (90, 93), "ab" * 32, 1.0)
    state = at(RunState.RoundWitness)
    with pytest.raises(CoordinatorError, match="peer 0 has no such message"):
        tick(state, TravelOn((one,), state.since))


def test_only_a_run_that_closes_at_a_quorum_records_what_travels_and_it_comes_back_from_json():
    _, _, plain = take(begun(ALL), {})
    for closing, told, found in ((ALL, ({},), False), (QUORUM, ({3: 9.0}, {}), True)):
        progress = begun(closing)
        for times in told:
            progress, round_ = driver.next_round(progress)
            said = evidence(progress, round_, times)
            progress, decision = driver.finish_round(progress, round_, said)
            entry = records.entry(round_, said, decision)
            line = entry.model_dump_json()
            assert Entry.model_validate_json(line) == entry
            assert ("travelling" in line) == found
    assert plain.state.on_their_way == ()


@hypothesis_settings(max_examples=40)
@given(
    st.integers(1, 5), st.sampled_from([0.0, 0.5, 3.0]), st.integers(0, 3),
    st.integers(1, 3), st.sampled_from([0, 3]), st.integers(0, 99),
    st.lists(st.lists(st.sampled_from([0.5, 1.0, 2.0, 6.0, 31.0, None]), min_size=5, max_size=5)),
)  # fmt: skip
def test_no_sequence_is_lost_and_none_is_merged_twice_whoever_is_late(
    quorum, grace, max_age, fragments, settle_every, seed, fates
):
    settings = replace(ENDLESS, total_steps=10, init_min_clients=5, rounds_per_epoch=4)
    closing = replace(
        QUORUM, quorum=quorum, grace_seconds=grace, max_age=max_age, fragments=fragments,
        steps=(3, 3, 2, 1, 1), settle_every=settle_every, last=10,
    )  # fmt: skip
    progress = driven_run.begun(settings, 5, seed, closing=closing)
    merged, given_out = [], 0
    while True:
        progress, round_ = driver.next_round(progress)
        if round_ is None:
            break
        assert {*round_.assignment} == {*range(5)}
        assert all(1 <= age_of(number) <= max_age for number in round_.travelling)
        assert all(
            (round_.step - one.step) == age_of(number) * fragments
            for number, one in round_.travelling.items()
        )
        if settle_every and (round_.step - 1) % settle_every == 0:
            assert not progress.state.on_their_way
        assert sum(last - first + 1 for first, last in round_.assignment.values()) <= 20
        given_out = max([given_out, *(last + 1 for _, last in round_.assignment.values())])
        row = fates[round_.step - 1] if round_.step <= len(fates) else [1.0] * 5
        said = evidence(progress, round_, dict(enumerate(row)))
        progress, decision = driver.finish_round(progress, round_, said)
        merged += [i for p in decision.applied for i in range(*round_.spans[p])]
        merged += [round_.spans[p][1] for p in decision.applied]
        assert not {*decision.applied} & {*decision.late, *decision.travelling}
        assert {*decision.applied, *decision.late, *decision.travelling} == {*round_.spans}
    state = progress.state
    left = [*state.untrained, *(one.span for one in state.on_their_way)]
    waiting = [i for first, last in left for i in range(first, last + 1)]
    assert len(merged) == len(set(merged))
    assert sorted(merged + waiting) == list(range(given_out))
    assert not (settle_every and state.on_their_way)
