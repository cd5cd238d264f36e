"""What a process does next about a round's links, by what it has read: no store, no clock."""

import pytest

from parts.volunteers import layout
from parts.volunteers.chain.act import Adopt, End, Look, Put, RoundRead, Wait, act
from parts.volunteers.chain.links import AskedLink, SlotContent
from parts.volunteers.store.verbs import StoredObject
from tests.parts.volunteers.test_links import HEAD, ORDER, RUN, counted, link

LONG_AGO, EVERYWHERE = -100.0, {"everywhere": True}
JOIN, LEAVE = (layout.of_peer(1, 5, what) for what in ("join", "leave"))


def content(peer, seconds, seen=0.0, **changes):
    """A signed link, put at a time by the store's clock, and seen at one of this process's."""
    return SlotContent(StoredObject(b"%d" % peer, seconds), link({}, peer=peer, **changes), seen)


def read(links, what="closed", **more):
    """A reading of links, each put at a time by the store's clock."""
    found = {p: content(p, at) if isinstance(at, int) else at for p, at in links.items()}
    return RoundRead(1, what, HEAD, 10, **{"turns": ORDER, "links": found} | more)


JUNK = SlotContent(StoredObject(b"x", 1_004))
BEGUN = {"me": 0, "begun": 100.0}  # its turn begins seven seconds later
READY = BEGUN | EVERYWHERE


# ---- Which link counts ----


@pytest.mark.parametrize(
    ("links", "more", "now", "action"),
    [
        ({}, {}, 0, Wait()),
        ({2: 1_004}, {}, 0, Adopt(2)),  # the first in the order, alone
        ({2: JUNK}, {}, 0, Wait()),
        ({0: 1_006}, {}, 0, Wait()),  # before its turn
        ({0: 1_006, 2: 1_003}, {}, 0, Adopt(2)),
        ({2: 1_004}, {"ejected": (2,)}, 0, Wait()),
        ({2: 1_004}, {"turns": None}, 0, Wait()),
        ({0: 1_009}, {}, 99, Look()),  # another may come before it
        ({0: 1_009}, EVERYWHERE, 11, Wait()),
        ({0: 1_009}, EVERYWHERE, 11.5, Adopt(0)),
        ({0: 1_009, 2: 1_008}, EVERYWHERE, 11.5, Adopt(2)),
        ({0: 1_009, 2: 1_009}, EVERYWHERE, 11.5, Adopt(2)),  # of one second, by turn
        ({0: 1_009, 2: 1_010}, EVERYWHERE, 11.5, Adopt(0)),
        # later objects show that it is long ago
        ({0: 1_009}, EVERYWHERE | {"listed": {JOIN: 1_019}}, 0, Wait()),
        ({0: 1_009}, EVERYWHERE | {"listed": {JOIN: 1_020}}, 0, Adopt(0)),
        ({0: 1_009}, EVERYWHERE | {"next_round": 1_019}, 0, Wait()),
        ({0: 1_009}, EVERYWHERE | {"next_round": 1_020}, 0, Adopt(0)),
        # refused ones are passed over
        ({2: 1_001, 0: 1_008}, {"refused": {2: "why"}}, 0, Look()),
        ({2: 1_001, 0: 1_008}, EVERYWHERE | {"refused": {2: "why"}}, 12, Adopt(0)),
        ({2: 1_001}, {"refused": {2: "why"}}, 0, Wait()),
        # in the volunteer's own turn
        ({}, BEGUN, 106, Wait()),
        ({}, BEGUN, 107, Look()),
        ({}, READY, 107, Put(())),
        ({}, READY | {"me": None}, 107, Wait()),
        ({}, READY | {"begun": None}, 107, Wait()),
        ({}, READY | {"turns": None}, 107, Wait()),
        ({0: JUNK}, READY, 107, Wait()),  # its slot is filled
        ({0: 1_008}, READY | {"refused": {0: "why"}}, 107, Wait()),
        ({2: JUNK}, READY, 107, Put(())),
        ({2: 1_004}, READY, 107, Adopt(2)),
        ({3: 1_105}, READY | {"listed": {JOIN: 1_115}}, 10, Wait()),  # another may count
        ({2: 1_004}, READY | {"refused": {2: "why"}}, 107, Put(())),
    ],
)
def test_the_link_counts_that_comes_first_or_in_its_turn_ones_own(links, more, now, action):
    assert act(read(links, **more), now) == action


def test_a_link_that_was_seen_later_puts_off_those_before_it():
    first = content(0, 1_009, seen=50.0)  # which an earlier object of it may still be on its way to
    assert act(read({0: first, 1: 1_021}, **EVERYWHERE), 12) == Adopt(
        0
    )  # by the other, seen earlier
    assert act(read({0: first, 1: content(1, 1_021, seen=49.0)}, **EVERYWHERE), 59) == Wait()


def test_refused_links_of_ones_own_second_are_not_named():
    found = read({2: 1_001, 0: content(0, 1_008, seen=9.0)}, refused={2: "why", 0: "why"})
    assert (found.refused_before(10.0), found.refused_before(12.0)) == ([2], [2, 0])


def test_a_link_that_names_another_before_it_is_looked_up_once():
    other = content(2, 1_004, previous="ee" * 32)
    for goes_back, doubted, action in (
        (True, set(), Look(before=True)),
        (True, {2}, Adopt(2)),
        (False, set(), Adopt(2)),
    ):
        assert act(read({2: other}, goes_back=goes_back, doubted=doubted), 0) == action
    refused = read({2: other}, goes_back=True, refused={2: "why"})
    assert act(refused, 0) == Wait()


# ---- The volunteer's turn ----


@pytest.mark.parametrize(
    ("now", "first_listed", "action"),
    [
        (107, {JOIN: LONG_AGO, LEAVE: LONG_AGO}, Put((JOIN, LEAVE))),
        (107, {JOIN: 105.5, LEAVE: LONG_AGO}, Wait()),  # it may be of the link's own second
        (114, {JOIN: 111.0, LEAVE: LONG_AGO}, Put((JOIN, LEAVE))),
        (114, {JOIN: 113.5, LEAVE: LONG_AGO}, Wait()),
        (115, {JOIN: 113.5, LEAVE: LONG_AGO}, Put((LEAVE,))),  # whoever puts more and more of them
    ],
)
def test_a_link_names_the_notices_that_were_there_before_it(now, first_listed, action):
    listed = dict.fromkeys(first_listed, 1_000)
    assert act(read({}, listed=listed, first_listed=first_listed, **READY), now) == action


def test_a_link_that_begins_a_round_waits_for_no_notice():
    given = {"listed": {JOIN: 1_000}, "first_listed": {JOIN: 106.9}}
    assert act(read({}, what="asked", **given, **READY), 107) == Put(())


# ---- Where links end ----


def record(peer, base="44" * 32):
    body = counted(peer).body.model_copy(update={"round": 2, "base": base})
    return layout.of_peer(2, peer, "record"), SlotContent(StoredObject(b"", 2_000), body)


def next_link(peer, previous):
    return layout.of_peer(2, peer, "closed"), content(peer, 2_000, previous=previous, round=2)


FALSE = {"links": {2: 1_001}, "refused": {2: "why"}}  # whose params are 44...
ASKED = AskedLink(run=RUN, round=1, peer=2, previous=HEAD.sha256, asked=(1,))  # which has none
FALSE_ASKED = FALSE | {"links": {2: SlotContent(StoredObject(b"2", 1_001), ASKED)}, "what": "asked"}


@pytest.mark.parametrize(
    ("more", "beyond", "wrong", "refused"),
    [
        ({"links": {}}, [], 0, 0),
        ({"links": {}}, [record(1)], 0, 0),  # too few to be sure
        ({"links": {}}, [record(1), record(3)], 1, 0),
        ({"links": {}}, [record(1), record(1)], 0, 0),
        (FALSE, [], 0, 1),
        (FALSE, [record(1)], 1, 0),  # it went on from it
        (FALSE, [record(2)], 0, 1),  # only its own signer did
        (FALSE, [record(1, base="55" * 32)], 0, 1),
        (FALSE, [next_link(1, content(2, 0).sha256)], 1, 0),
        (FALSE, [next_link(1, HEAD.sha256)], 0, 1),
        (FALSE_ASKED, [record(1)], 0, 1),
        ({"links": {0: 1_006}}, [], 0, 1),  # before its turn
        ({"links": {0: JUNK}}, [], 0, 0),
    ],
)
def test_who_looks_on_ends_with_what_is_there_or_with_what_can_never_follow(
    more, beyond, wrong, refused
):
    for waits in (False, True):
        found = read(**more, beyond=beyond, waits=waits, min_clients=2, went_on=0.0)
        if wrong:  # perhaps a link was put after its slot was looked into
            assert act(found, 0) == Look()
            found.everywhere = True
            assert act(found, found.settle) == Wait()
        end = act(found, found.settle + 1)
        if waits and not wrong:
            assert end == Wait()
            continue
        assert isinstance(end, End)
        assert (len(end.wrong), len(end.refused)) == (wrong, refused)
        assert (end.step, end.beyond) == (1, [name for name, _ in beyond])


def test_who_trains_never_ends():
    assert act(read({}, beyond=None, waits=False), 0) == Wait()
