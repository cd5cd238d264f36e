"""Rounds over a store, which shows all peers the same: nobody need attest."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from lockstep.protocol import coordinator, driver
from lockstep.protocol.coordinator import CoordinatorError
from lockstep.protocol.run_state import RunState
from lockstep.transcript.follow import ContradictionError, begin_round, finish_round
from tests.lockstep.protocol import records
from tests.lockstep.protocol.driver.driven_run import LONG, begun, evidence, other, spans, train

FEW = replace(LONG, init_min_clients=4, min_clients=2)


def stored(settings=LONG, count=5):
    return driver.next_round(begun(settings, count, stored=True))


@pytest.mark.parametrize(("witness_nodes", "peers"), [(1, 64), (0, 64), (32, 64)])
def test_40_of_64_members_fall_silent_and_the_others_messages_are_applied(witness_nodes, peers):
    settings = replace(LONG, witness_nodes=witness_nodes, batch=64)
    progress, round = stored(settings, peers)
    silent = tuple(range(0, 40))
    said = evidence(round, silent=silent)
    assert said.attestations == ()
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.applied == tuple(range(40, 64))
    assert decision.dropped == silent
    progress, after = driver.next_round(progress)
    assert after.peers == tuple(sorted(after.peers)) == tuple(range(40, 64))
    assert spans(after) >= {round.assignment[peer] for peer in silent[:24]}


@pytest.mark.parametrize("gone", [1, 12, 31])
def test_silent_members_that_would_be_witnesses_cost_nobody_else_the_round(gone):
    progress, round = stored(replace(LONG, witness_nodes=32, batch=64), 64)
    silent = tuple(range(gone))
    _, decision = driver.finish_round(progress, round, evidence(round, silent=silent))
    assert len(decision.applied) == 64 - gone


def test_all_trained_and_in_time_goes_as_with_witnesses():
    rounds, decisions, progress = train(begun(LONG, 5, stored=True))
    others, same, _ = train(begun(LONG, 5))
    assert [replace(r, witnesses=()) for r in others] == rounds
    assert [d.applied for d in same] == [d.applied for d in decisions]
    assert progress.state.run_state == RunState.Finished


def test_run_of_too_few_waits_and_goes_on_when_they_ask():
    progress, round = stored(FEW)
    silent = round.peers[:4]
    progress, _ = driver.finish_round(progress, round, evidence(round, silent=silent))
    progress, none = driver.next_round(progress)
    assert (none, progress.waiting) == (None, True)
    progress, none = driver.next_round(driver.ask(progress, silent[:2]))
    assert (none, progress.waiting) == (None, True)
    progress, after = driver.next_round(driver.ask(progress, silent[2:3]))
    assert {*after.peers} == {*round.peers} - {silent[3]}
    assert spans(after) >= {round.assignment[peer] for peer in silent}


def test_run_that_nobody_asked_to_join_waits():
    progress, none = driver.next_round(driver.start(FEW, 5, 1, 10, stored=True))
    assert (none, progress.waiting) == (None, True)


@pytest.mark.parametrize("author", [2, 4])
def test_author_of_a_false_link_is_ejected_member_or_not(author):
    progress = driver.start(FEW, 5, 1, 10, stored=True)
    progress, round = driver.next_round(driver.ask(progress, range(4)))
    said = replace(evidence(round), false_links=(author,))
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == {author: "false link"}
    assert decision.applied == tuple(p for p in range(4) if p != author)
    assert driver.may_ask(progress, [author]) == ()


def test_sender_of_bytes_that_are_no_message_is_ejected_by_all():
    progress, round = stored()
    _, decision = driver.finish_round(progress, round, evidence(round, refused=(3,)))
    assert decision.ejected == {3: "no message"}
    assert 3 not in decision.applied


def test_late_message_is_not_applied_and_its_sequences_are_given_out_again():
    progress, round = stored()
    progress, decision = driver.finish_round(progress, round, evidence(round, {1: 30.5}))
    assert decision.late == (1,)
    _, after = driver.next_round(progress)
    assert round.assignment[1] in spans(after)


def test_what_the_store_shows_is_exact():
    progress, round = stored(replace(LONG, batch=256), 256)
    silent = tuple(range(128))
    _, decision = driver.finish_round(progress, round, evidence(round, silent=silent))
    assert decision.dropped == silent  # a filter takes some of so many for present


def test_only_a_run_over_a_store_is_told_what_it_shows():
    progress, _ = driver.next_round(begun(LONG, 5))
    with pytest.raises(CoordinatorError, match="witnesses"):
        coordinator.tick(progress.state, coordinator.Stored((0,), progress.now))


@pytest.mark.parametrize(
    ("said", "kind"),
    [({"others": {1: other((2,))}}, "messages"), ({"false_links": (1,)}, None)],
)
def test_transcript_of_a_store_is_followed_and_has_no_second_messages(said, kind):
    progress = driver.start(LONG, 5, 1, 10, stored=True)
    after, round = driver.next_round(driver.ask(progress, range(5)))
    found = replace(evidence(round), **said)
    _, decision = driver.finish_round(after, round, found)
    entry = records.entry(round, found, decision, asked=tuple(range(5)))
    if kind is None:
        finish_round(begin_round(progress, entry), entry)
        return
    with pytest.raises(ContradictionError) as caught:
        begin_round(progress, entry)
    assert caught.value.kind == kind


def test_false_links_are_none_of_a_run_with_witnesses():
    progress = driver.start(LONG, 5, 1, 10)
    after, round = driver.next_round(driver.ask(progress, range(5)))
    found = replace(evidence(round), false_links=(1,))
    _, decision = driver.finish_round(after, round, found)
    with pytest.raises(ContradictionError, match="false links"):
        begin_round(progress, records.entry(round, found, decision, asked=tuple(range(5))))


def test_256_who_come_and_go_train_everything_once_and_lose_nothing():
    count, rng = 256, random.Random(0)
    settings = replace(
        LONG,
        init_min_clients=32,
        min_clients=32,
        batch=1024,
        total_steps=200,
        rounds_per_epoch=4,
    )
    progress = driver.ask(driver.start(settings, count, 1, 10, stored=True), range(200))
    away, applied, taken = {*range(200, 256)}, Counter(), 0
    while True:
        progress, round = driver.next_round(progress)
        if round is None and progress.waiting:
            progress = driver.ask(progress, driver.may_ask(progress, sorted(away)))
            continue
        if round is None:
            break
        share = 0.4 if round.step == 100 else 0.05
        silent = tuple(sorted(rng.sample(round.peers, int(share * len(round.peers)))))
        back = driver.may_ask(progress, sorted(rng.sample(range(count), count // 20)))
        taken += 1
        progress, decision = driver.finish_round(progress, round, evidence(round, silent=silent))
        assert {*decision.applied} == round.assignment.keys() - {*silent}
        for peer in decision.applied:
            applied.update(range(round.assignment[peer][0], round.assignment[peer][1] + 1))
        away = {*range(count)} - {record.peer for record in progress.state.peers}
        progress = driver.ask(progress, driver.may_ask(progress, back))
    left = {index for first, last in progress.state.untrained for index in range(first, last + 1)}
    assert taken == 200
    assert {*applied.values()} == {1}
    assert applied.keys() | left == {*range(progress.state.data_index)}
    assert not left & applied.keys()
