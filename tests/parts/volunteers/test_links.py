"""What follows from a link, and every reason for which one does not."""

from dataclasses import replace

import pytest

from lockstep.protocol import driver
from lockstep.wire.exchange import Sent
from parts.volunteers.bodies import MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Head, RoundLink, Terms
from parts.volunteers.chain.messages import WITHHELD, Counted, Refused
from tests.lockstep.protocol.driver.driven_run import LONG

RUN, HEAD = "ab" * 32, Head("cd" * 32, 1_000)
TERMS = Terms(limit=30.0, settle=10, extra=3)
PROGRESS = driver.ask(driver.start(LONG, 6, 1, 10, stored=True), range(5))
PROGRESS, ROUND = driver.next_round(PROGRESS)
OVER = 1_040


def counted(peer: int, seconds: int = 5) -> Counted:
    body = MessageRecord(
        run=RUN, round=1, peer=peer, span=ROUND.assignment[peer], base="00" * 32,
        commitment=f"{peer:02x}" * 32, bytes=3, sha256="11" * 32, loss=1.0, environment="22" * 32,
    )  # fmt: skip
    return Counted(body, seconds, f"{peer:02x}" * 32, Sent(b"abc", b"", message={}))


ALL = {peer: counted(peer) for peer in ROUND.assignment}
MOST = {peer: one for peer, one in ALL.items() if peer != 3}
LATE_PAYLOAD = MOST | {3: Refused(WITHHELD, "33" * 32)}
BAD_BASE = MOST | {3: Refused("base", "33" * 32)}


def link(shown: links.Shown, **changes: object) -> RoundLink:
    messages, rejected = links.linked(shown)
    found = {
        "run": RUN, "round": 1, "peer": 0, "previous": HEAD.sha256, "asked": (), "left": (),
        "messages": messages, "rejected": rejected, "false_links": (), "applied": (0, 1, 2, 3, 4),
        "params": "44" * 32, "shared": "55" * 32,
    }  # fmt: skip
    return RoundLink(**found | changes)


def check(one: RoundLink, shown: links.Shown, seconds: int, **said: object) -> None:
    told = {"joins": (), "leaves": (), "false_links": ()} | said
    links.check_link(one, seconds, HEAD, ROUND, shown, terms=TERMS, **told)


@pytest.mark.parametrize(
    ("shown", "seconds", "said"),
    [
        (ALL, 1_001, {}),  # all stand in it: at once
        (BAD_BASE, 1_001, {}),  # merged or rejected
        (MOST, OVER, {}),  # without the silent, when the round is over
        (LATE_PAYLOAD, OVER, {}),
        ({}, OVER, {}),  # nobody sent anything
    ],
)
def test_link_that_follows(shown, seconds, said):
    check(link(shown), shown, seconds, **said)


def test_link_may_leave_out_a_record_that_came_too_late_to_count():
    assert (TERMS.counts(30), TERMS.counts(31)) == (True, False)
    assert (TERMS.is_over(39), TERMS.is_over(40)) == (False, True)


def other(name: str, peer: int, **changes: object) -> dict:
    """A link's messages or rejections, of which one is changed."""
    of = getattr(link(BAD_BASE), name)
    return {name: of | {peer: of[peer].model_copy(update=changes)}}


@pytest.mark.parametrize(
    ("said", "shown", "seconds", "changes", "reason"),
    [
        (ALL, ALL, 1_001, {"previous": "ee" * 32}, "follows"),
        (ALL, ALL, 1_001, {"round": 2}, "follows"),
        (MOST, ALL, 1_039, {}, "too early"),
        (MOST, MOST, 1_039, {}, "too early"),
        ({}, ALL, 1_001, {}, "too early"),
        (LATE_PAYLOAD, LATE_PAYLOAD, 1_039, {}, "too early"),  # the payload may still come
        (MOST, ALL, OVER, {}, r"leaves out \[3\]"),
        (MOST, BAD_BASE, OVER, {}, r"leaves out \[3\]"),
        ({}, ALL, OVER, {}, "leaves out"),
        (ALL, MOST, 1_001, {}, r"messages of \[3\]"),  # one that nobody sent
        (ALL, BAD_BASE, OVER, {}, "messages"),  # a rejected one as a message
        (BAD_BASE, ALL, OVER, {}, "messages"),  # a message as a rejected one
        (BAD_BASE, LATE_PAYLOAD, OVER, {}, "messages"),  # for another reason
        (BAD_BASE, BAD_BASE, OVER, other("messages", 1, commitment="ee" * 32), "messages"),
        (BAD_BASE, BAD_BASE, OVER, other("messages", 1, bytes=4), "messages"),
        (BAD_BASE, BAD_BASE, OVER, other("messages", 1, seconds=6), "messages"),
        (BAD_BASE, BAD_BASE, OVER, other("messages", 1, record="ee" * 32), "messages"),
        (BAD_BASE, BAD_BASE, OVER, other("rejected", 3, record="ee" * 32), "messages"),
        (ALL, ALL, 1_001, {"rejected": link(BAD_BASE).rejected}, "messages"),  # as both
        (ALL, ALL, 1_001, {"asked": (5,)}, "asked"),  # who did not ask
        (ALL, ALL, 1_001, {"left": (2,)}, "left"),
        (ALL, ALL, 1_001, {"false_links": (2,)}, "false_links"),
    ],
)
def test_link_that_does_not_follow(said, shown, seconds, changes, reason):
    with pytest.raises(FalseLinkError, match=reason):
        check(link(said, **changes), shown, seconds)


def test_link_names_who_asked_who_left_and_who_signed_false_ones():
    said = {"joins": {5, 2}, "leaves": {1}, "false_links": (4, 4)}
    check(link(ALL, asked=(5,), left=(1,), false_links=(4,)), ALL, 1_001, **said)
    for changes, reason in (
        ({"asked": (5, 2), "false_links": (4,)}, "asked"),  # not ascending
        ({"asked": (5, 5), "false_links": (4,)}, "asked"),
        ({"false_links": ()}, "false_links"),  # shields a liar
    ):
        with pytest.raises(FalseLinkError, match=reason):
            check(link(ALL, **changes), ALL, 1_001, **said)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"applied": (0, 1, 2)}, "applied"),
        ({"params": "ee" * 32}, "params"),
        ({"shared": "ee" * 32}, "shared"),
        ({"asked": (2,)}, "asked"),  # it takes part already
    ],
)
def test_link_with_another_outcome_does_not_follow(changes, reason):
    outcome = (0, 1, 2, 3, 4), "44" * 32, "55" * 32, PROGRESS
    links.check_outcome(link(ALL), *outcome)
    links.check_outcome(link(ALL, asked=(5,)), *outcome)
    with pytest.raises(FalseLinkError, match=reason):
        links.check_outcome(link(ALL, **changes), *outcome)


def asked(*peers: int, **changes: object) -> AskedLink:
    found = {"run": RUN, "round": 1, "peer": 0, "previous": HEAD.sha256, "asked": peers}
    return AskedLink(**found | changes)


def test_run_that_waits_goes_on_with_those_who_asked():
    waiting, none = driver.next_round(driver.start(LONG, 6, 1, 10, stored=True))
    assert none is None
    joins = range(6)
    after = links.check_asked(asked(0, 1, 2, 3, 4), 1_003, HEAD, waiting, terms=TERMS, joins=joins)
    assert driver.next_round(after)[1] == ROUND
    for wrong, seconds, reason in (
        (asked(0, 1, 2, 3, 4), 1_002, "too early"),
        (asked(0, 1, 2, 3), 1_003, "enough"),
        (asked(0, 1, 2, 3, 4, previous="ee" * 32), 1_003, "follows"),
        (asked(0, 1, 2, 3, 4, round=2), 1_003, "follows"),
        (asked(4, 3, 2, 1, 0), 1_003, "asked"),
    ):
        with pytest.raises(FalseLinkError, match=reason):
            links.check_asked(wrong, seconds, HEAD, waiting, terms=TERMS, joins=joins)
    with pytest.raises(FalseLinkError, match="asked"):  # of one that did not
        links.check_asked(asked(0, 1, 2, 3, 5), 1_003, HEAD, waiting, terms=TERMS, joins=range(5))


def test_each_has_its_turn_to_close_and_who_is_no_member_comes_last():
    assert sorted(links.turn(ROUND, peer) for peer in ROUND.peers) == [*range(5)]
    assert links.turn(ROUND, 5) == 5
    later = replace(ROUND, seed=ROUND.seed + 1)
    assert [links.turn(later, p) for p in range(5)] != [links.turn(ROUND, p) for p in range(5)]


def test_round_is_whole_when_nothing_can_still_come():
    assert links.is_whole(ROUND, ALL)
    assert links.is_whole(ROUND, BAD_BASE)
    assert not links.is_whole(ROUND, MOST)
    assert not links.is_whole(ROUND, LATE_PAYLOAD)
