"""Rounds of which a store reports, which shows all peers the same: nobody need attest."""

from dataclasses import replace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.consensus import ElectedWitnesses, Reports, SharedStore
from lockstep.protocol.run_state import RunState
from lockstep.transcript.recomputed import ContradictionError, begin_round, finish_round
from tests.lockstep.protocol import records
from tests.lockstep.protocol.driver.driven_run import (
    LONG,
    begun,
    evidence,
    other,
    spans,
    started,
    train,
)

STORE = SharedStore()
FEW = replace(LONG, init_min_clients=4, min_clients=2)


def shown(settings=LONG, count=5):
    return driver.next_round(begun(settings, count, reports=STORE))


def test_40_of_64_members_fall_silent_and_the_others_messages_are_applied():
    """Among them all that would be witnesses."""
    progress, round = shown(replace(LONG, witness_nodes=32, batch=64), 64)
    silent = tuple(range(0, 40))
    said = evidence(round, silent=silent)
    assert said.attestations == ()
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.applied == tuple(range(40, 64))
    assert decision.dropped == silent
    progress, after = driver.next_round(progress)
    assert after.peers == tuple(sorted(after.peers)) == tuple(range(40, 64))
    assert spans(after) >= {round.assignment[peer] for peer in silent[:24]}


def test_all_trained_and_in_time_goes_as_with_witnesses():
    rounds, decisions, progress = train(begun(LONG, 5, reports=STORE))
    others, same, _ = train(begun(LONG, 5))
    assert [replace(r, witnesses=()) for r in others] == rounds
    assert [d.applied for d in same] == [d.applied for d in decisions]
    assert progress.state.run_state == RunState.Finished


def test_run_of_too_few_waits_and_goes_on_when_they_ask():
    progress, round = shown(FEW)
    silent = round.peers[:4]
    progress, _ = driver.finish_round(progress, round, evidence(round, silent=silent))
    progress, none = driver.next_round(progress)
    assert (none, progress.waiting) == (None, True)
    progress, none = driver.next_round(driver.ask(progress, silent[:2]))
    assert (none, progress.waiting) == (None, True)
    progress, after = driver.next_round(driver.ask(progress, silent[2:3]))
    assert {*after.peers} == {*round.peers} - {silent[3]}
    assert spans(after) >= {round.assignment[peer] for peer in silent}


@pytest.mark.parametrize("author", [2, 4])
def test_author_of_a_false_link_is_ejected_member_or_not(author):
    progress = started(FEW, 5, reports=STORE)
    progress, round = driver.next_round(driver.ask(progress, range(4)))
    said = replace(evidence(round), false_links=(author,))
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == {author: "false link"}
    assert decision.applied == tuple(p for p in range(4) if p != author)
    assert driver.may_ask(progress, [author]) == ()


def test_sender_of_bytes_that_are_no_message_is_ejected_by_all():
    progress, round = shown()
    _, decision = driver.finish_round(progress, round, evidence(round, refused=(3,)))
    assert decision.ejected == {3: "no message"}
    assert 3 not in decision.applied


def test_what_the_store_shows_is_exact():
    progress, round = shown(replace(LONG, batch=256), 256)
    silent = tuple(range(128))
    _, decision = driver.finish_round(progress, round, evidence(round, silent=silent))
    assert decision.dropped == silent  # a filter takes some of so many for present


def recorded(reports: Reports, **said):
    """A run at its start, and the record of a first round of which something else was said."""
    progress = started(LONG, 5, reports=reports)
    after, round = driver.next_round(driver.ask(progress, range(5)))
    found = replace(evidence(round), **said)
    _, decision = driver.finish_round(after, round, found)
    return progress, records.entry(round, found, decision, asked=tuple(range(5)))


def test_transcript_of_a_store_is_followed_with_false_links_in_it():
    progress, entry = recorded(STORE, false_links=(1,))
    finish_round(begin_round(progress, entry), entry)


@pytest.mark.parametrize(
    ("reports", "said", "text"),
    [
        (STORE, {"others": {1: other((2,))}}, "second messages"),
        (ElectedWitnesses(), {"false_links": (1,)}, "false links"),
    ],
)
def test_a_store_has_no_second_messages_and_a_run_with_witnesses_no_links(reports, said, text):
    progress, entry = recorded(reports, **said)
    with pytest.raises(ContradictionError, match=text):
        begin_round(progress, entry)
