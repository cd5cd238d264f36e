"""In which order peers put their links, and when each one's turn is."""

import pytest

from lockstep.protocol import driver
from lockstep.protocol.consensus import SharedStore
from parts.volunteers.chain import links
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Turns
from parts.volunteers.chain.payloads import Refused
from tests.lockstep.protocol.driver.driven_run import LONG, started
from tests.parts.volunteers.test_links import ALL, HEAD, MOST, ROUND, RUN, TERMS, counted

ORDER = Turns((2, 0, 3, 1), 1_000, 7.0)


def test_a_link_counts_from_its_turn_on():
    assert [ORDER.rank(2, s) for s in (999, 1_000, 1_050)] == [None, (1_000, 0), (1_050, 0)]
    assert [ORDER.rank(0, s) for s in (1_006, 1_007)] == [None, (1_007, 1)]
    assert [ORDER.is_alone(2, s) for s in (1_000, 1_006, 1_007)] == [True, True, False]
    assert not ORDER.is_alone(0, 1_000)


def test_turns_begin_with_the_last_message_or_when_the_round_is_over():
    late = ALL | {1: counted(1, 17)}
    for shown, since in ((ALL, 5), (late, 17), (MOST, 40), ({}, 40)):
        found = links.turns_to_close(ROUND, shown, HEAD, TERMS, 8)
        assert (found.since, sorted(found.order)) == (HEAD.seconds + since, [*range(8)])
    rejected = MOST | {3: Refused("base", 21, "33" * 32)}
    assert links.turns_to_close(ROUND, rejected, HEAD, TERMS, 8).since == HEAD.seconds + 21


def test_who_sent_a_message_comes_first_and_who_is_no_member_last():
    orders = [links.turns_to_close(ROUND, shown, HEAD, TERMS, 8).order for shown in (ALL, MOST)]
    assert {*orders[0][:5]} == {*range(5)} and {*orders[0][5:]} == {5, 6, 7}
    assert orders[1][4] == 3 and {*orders[1][:4]} == {0, 1, 2, 4}
    assert links.in_order(1, range(5)) != links.in_order(2, range(5))


def test_a_run_waits_until_a_second_after_enough_have_asked():
    waiting, _ = driver.next_round(started(LONG, 6, reports=SharedStore()))
    joins = {0: 1_001, 3: 1_009, 1: 1_002, 2: 1_009, 4: 1_003, 5: 1_030}
    found = links.turns_to_begin(waiting, joins, HEAD, TERMS, 6)
    assert (found.since, found.order[-1]) == (1_010, 5)
    assert links.turns_to_begin(waiting, dict.fromkeys(range(5), 1), HEAD, TERMS, 6).since == 1_003
    assert links.turns_to_begin(waiting, dict.fromkeys(range(4), 1), HEAD, TERMS, 6) is None
    assert links.put_before(1_009, joins) == [0, 1, 4]


def test_a_link_names_nobody_who_asked_in_its_second_or_later():
    """Or it would be false for who looked before the notice came, and true for who looked later."""
    waiting = driver.ask(started(LONG, 5, reports=SharedStore()), range(4))
    link = AskedLink(run=RUN, round=1, peer=4, previous=HEAD.sha256, asked=(4,))

    def after(seconds):
        joins = links.put_before(seconds, {4: 1_005})
        return links.check_asked(link, HEAD, waiting, joins, ())

    assert not after(1_006).waiting
    with pytest.raises(FalseLinkError, match="asked"):
        after(1_005)
