"""What follows from a link, every reason for which one does not, and whose turn it is."""

from dataclasses import replace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.consensus import SharedStore
from lockstep.wire.exchange import Sent
from parts.volunteers.bodies import MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Head, RoundLink, Terms, Turns
from parts.volunteers.chain.payloads import WITHHELD, MessageInTime, Refused
from tests.lockstep.protocol.driver.driven_run import LONG, started

RUN, HEAD = "ab" * 32, Head("cd" * 32, 1_000)
TERMS = Terms(limit=30.0, settle=10, extra=3, turn=7.0)
PROGRESS = driver.ask(started(LONG, 6, reports=SharedStore()), range(5))
PROGRESS, ROUND = driver.next_round(PROGRESS)


def counted(peer: int, seconds: int = 5) -> MessageInTime:
    body = MessageRecord(
        run=RUN, round=1, peer=peer, span=ROUND.assignment[peer], base="00" * 32,
        commitment=f"{peer:02x}" * 32, bytes=3, sha256="11" * 32, loss=1.0, environment="22" * 32,
    )  # fmt: skip
    return MessageInTime(body, seconds, f"{peer:02x}" * 32, Sent(b"abc", b"", message={}))


ALL = {peer: counted(peer) for peer in ROUND.assignment}
MOST = {peer: one for peer, one in ALL.items() if peer != 3}
LATE_PAYLOAD = MOST | {3: Refused(WITHHELD, 5, "33" * 32)}
BAD_BASE = MOST | {3: Refused("base", 5, "33" * 32)}


def link(shown: links.Shown, **changes: object) -> RoundLink:
    messages, rejected = links.linked(shown)
    found = {
        "run": RUN, "round": 1, "peer": 0, "previous": HEAD.sha256, "asked": (), "left": (),
        "messages": messages, "rejected": rejected, "false_links": (), "applied": (0, 1, 2, 3, 4),
        "params": "44" * 32, "shared": "55" * 32, "state": None,
    }  # fmt: skip
    return RoundLink(**found | changes)


def check(one: RoundLink, shown: links.Shown, head: Head = HEAD, **said: object) -> None:
    told = {"joins": (), "leaves": (), "refused": ()} | said
    links.check_link(one, head, ROUND, shown, **told)


@pytest.mark.parametrize("shown", [ALL, BAD_BASE, MOST, LATE_PAYLOAD, {}])
def test_link_that_follows(shown):
    check(link(shown), shown)


def test_round_may_close_without_what_is_missing_once_it_is_too_late_to_count():
    assert (TERMS.is_over(39), TERMS.is_over(40)) == (False, True)


def other(name: str, peer: int, **changes: object) -> dict:
    """A link's messages or rejections, of which one is changed."""
    of = getattr(link(BAD_BASE), name)
    return {name: of | {peer: of[peer].model_copy(update=changes)}}


@pytest.mark.parametrize(
    ("said", "shown", "changes", "reason"),
    [
        (ALL, ALL, {"previous": "ee" * 32}, "follows"),
        (ALL, ALL, {"round": 2}, "follows"),
        (MOST, ALL, {}, r"messages of peers \[3\]"),  # one is left out
        (ALL, MOST, {}, r"messages of peers \[3\]"),  # one that nobody sent
        (ALL, BAD_BASE, {}, "messages"),  # a rejected one as a message
        (BAD_BASE, ALL, {}, "messages"),  # a message as a rejected one
        (BAD_BASE, LATE_PAYLOAD, {}, "messages"),  # for another reason
        (BAD_BASE, BAD_BASE, other("messages", 1, commitment="ee" * 32), r"of peers \[1\]"),
        (BAD_BASE, BAD_BASE, other("messages", 1, bytes=4), "messages"),
        (BAD_BASE, BAD_BASE, other("messages", 1, seconds=6), "messages"),
        (BAD_BASE, BAD_BASE, other("messages", 1, record="ee" * 32), "messages"),
        (BAD_BASE, BAD_BASE, other("rejected", 3, record="ee" * 32), "messages"),
        (ALL, ALL, {"rejected": link(BAD_BASE).rejected}, "messages"),  # as both
        (ALL, ALL, {"asked": (5,)}, "asked"),  # who did not ask
        (ALL, ALL, {"left": (2,)}, "left"),
        (ALL, ALL, {"false_links": (2,)}, "false_links"),
    ],
)
def test_link_that_does_not_follow(said, shown, changes, reason):
    with pytest.raises(FalseLinkError, match=reason):
        check(link(said, **changes), shown)


def test_link_names_who_asked_who_left_and_who_signed_false_ones():
    said = {"joins": {5, 2}, "leaves": {1}, "refused": [4]}
    check(link(ALL, asked=(5,), left=(1,), false_links=(4,)), ALL, **said)
    for changes in ({"asked": (5, 2)}, {"asked": (5, 5)}):  # not ascending
        with pytest.raises(FalseLinkError, match="asked"):
            check(link(ALL, **changes), ALL, **said)


def test_link_may_miss_a_false_one_that_the_next_must_name():
    check(link(ALL), ALL, refused=[4])  # which came at the same moment
    owes = replace(HEAD, owed=(4,))
    check(link(ALL, false_links=(4,)), ALL, owes)
    check(link(ALL, false_links=(2, 4)), ALL, owes, refused=[2])
    with pytest.raises(FalseLinkError, match="false_links"):  # shields a liar
        check(link(ALL), ALL, owes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"applied": (0, 1, 2)}, "applied"),
        ({"params": "ee" * 32}, "params"),
        ({"shared": "ee" * 32}, "shared"),
        ({"state": "ee" * 32}, "state"),
        ({"asked": (2,)}, "asked"),  # it takes part already
    ],
)
def test_link_with_another_outcome_does_not_follow(changes, reason):
    outcome = (0, 1, 2, 3, 4), ("44" * 32, "55" * 32, None), PROGRESS
    links.check_outcome(link(ALL), *outcome)
    links.check_outcome(link(ALL, asked=(5,)), *outcome)
    with pytest.raises(FalseLinkError, match=reason):
        links.check_outcome(link(ALL, **changes), *outcome)


def asked(*peers: int, **changes: object) -> AskedLink:
    found = {"run": RUN, "round": 1, "peer": 0, "previous": HEAD.sha256, "asked": peers}
    return AskedLink(**found | changes)


def test_run_that_waits_goes_on_with_those_who_asked():
    waiting, none = driver.next_round(started(LONG, 6, reports=SharedStore()))
    assert none is None
    after = links.check_asked(asked(0, 1, 2, 3, 4), HEAD, waiting, range(6), (0, 1, 2))
    assert driver.next_round(after)[1] == ROUND
    for wrong, joins, reason in (
        (asked(0, 1, 2, 3, 4, previous="ee" * 32), range(6), "follows"),
        (asked(0, 1, 2, 3, 4, round=2), range(6), "follows"),
        (asked(4, 3, 2, 1, 0), range(6), "asked"),
        (asked(0, 1, 3, 4, 5), range(6), "asked"),  # leaves out who asked in time
        (asked(0, 1, 2, 3, 5), range(5), "asked"),  # of one that did not
    ):
        with pytest.raises(FalseLinkError, match=reason):
            links.check_asked(wrong, HEAD, waiting, joins, (0, 1, 2))


def test_round_is_whole_when_nothing_can_still_come():
    assert links.is_whole(ROUND, ALL)
    assert links.is_whole(ROUND, BAD_BASE)
    assert not links.is_whole(ROUND, MOST)
    assert not links.is_whole(ROUND, LATE_PAYLOAD)


# ---- Turns ----

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
