"""Whose link counts: each peer's from its turn on, and the first of those that follow."""

import hashlib
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.consensus import SharedStore
from lockstep.transcript.windows import Snapshots
from parts.volunteers import keys, slots
from parts.volunteers.audits.draws import AuditDraws
from parts.volunteers.bodies import Admission
from parts.volunteers.chain import links, turns
from parts.volunteers.chain import slate as slate_module
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.links import AskedLink, FalseLinkError, Head, Terms
from parts.volunteers.chain.payloads import Refused
from parts.volunteers.chain.place import RunInStore
from parts.volunteers.chain.slate import Slate
from parts.volunteers.chain.turns import Turns
from parts.volunteers.signed import sign
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.training.from_state import LateJoiner
from parts.volunteers.training.waiting import Waiting
from tests.lockstep.protocol.driver.driven_run import LONG, started
from tests.parts.volunteers.test_links import ALL, HEAD, MOST, ROUND, TERMS, counted
from tests.parts.volunteers.test_links import link as round_link

RUN = "ab" * 32
LAB, *KEYS = (keys.PrivateKey.generate() for _ in range(5))
ORDER = Turns((2, 0, 3, 1), 1_000, 7.0)
BEGAN = 900


# ---- Turns ----


def test_a_link_counts_from_its_turn_on():
    assert [ORDER.rank(2, s) for s in (999, 1_000, 1_050)] == [None, (1_000, 0), (1_050, 0)]
    assert [ORDER.rank(0, s) for s in (1_006, 1_007)] == [None, (1_007, 1)]
    assert [ORDER.is_alone(2, s) for s in (1_000, 1_006, 1_007)] == [True, True, False]
    assert not ORDER.is_alone(0, 1_000)


def test_turns_begin_with_the_last_message_or_when_the_round_is_over():
    late = ALL | {1: counted(1, 17)}
    for shown, since in ((ALL, 5), (late, 17), (MOST, 40), ({}, 40)):
        found = turns.turns_to_close(ROUND, shown, HEAD, TERMS, 8)
        assert (found.since, sorted(found.order)) == (HEAD.seconds + since, [*range(8)])
    rejected = MOST | {3: Refused("base", 21, "33" * 32)}
    assert turns.turns_to_close(ROUND, rejected, HEAD, TERMS, 8).since == HEAD.seconds + 21


def test_who_sent_a_message_comes_first_and_who_is_no_member_last():
    orders = [turns.turns_to_close(ROUND, shown, HEAD, TERMS, 8).order for shown in (ALL, MOST)]
    assert {*orders[0][:5]} == {*range(5)} and {*orders[0][5:]} == {5, 6, 7}
    assert orders[1][4] == 3 and {*orders[1][:4]} == {0, 1, 2, 4}
    assert turns.in_order(1, range(5)) != turns.in_order(2, range(5))


def test_a_run_waits_until_a_second_after_enough_have_asked():
    waiting, _ = driver.next_round(started(LONG, 6, reports=SharedStore()))
    joins = {0: 1_001, 3: 1_009, 1: 1_002, 2: 1_009, 4: 1_003, 5: 1_030}
    found = turns.turns_to_begin(waiting, joins, HEAD, TERMS, 6)
    assert (found.since, found.order[-1]) == (1_010, 5)
    assert turns.turns_to_begin(waiting, dict.fromkeys(range(5), 1), HEAD, TERMS, 6).since == 1_003
    assert turns.turns_to_begin(waiting, dict.fromkeys(range(4), 1), HEAD, TERMS, 6) is None
    assert turns.put_before(1_009, joins) == [0, 1, 4]


# ---- Links in their slots ----


@pytest.fixture
def place(tmp_path):
    store = FolderStore(tmp_path)
    for peer, key in enumerate(KEYS):
        said = Admission(run=RUN, peer=peer, number=0, key=keys.public_text(key))
        put(store, slots.admission(peer, 0), sign(said, LAB), BEGAN - 1)
    admissions = Admissions(store, RUN, LAB.public_key(), len(KEYS))
    admissions.read()
    document = SimpleNamespace(slots=len(KEYS))
    terms = Terms(limit=30.0, settle=10, extra=3, turn=7.0)
    audits = Snapshots(0, 9, 3), AuditDraws(6.25), 60
    return RunInStore(store, document, RUN, admissions, terms, Head("cd" * 32, BEGAN), *audits)


@pytest.fixture
def clock(monkeypatch):
    """A volunteer's own clock, which the test puts forward."""
    found = SimpleNamespace(now=0.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(slate_module, "time", found)
    return found


def put(store, name, content, seconds):
    assert store.create(name, content)
    os.utime(store.root / name, (seconds, seconds))


def link(peer, asked=(), **changes):
    found = {"run": RUN, "round": 1, "peer": peer, "previous": "cd" * 32, "asked": asked}
    return AskedLink(**found | changes)


def put_link(place, peer, seconds, key=None, body=None, **changes):
    content = sign(body or link(peer, **changes), key or KEYS[peer], place.link_bytes)
    put(place.store, slots.of_peer(1, peer, "asked"), content, seconds)


def follows(one, seconds):
    if one.asked:
        raise FalseLinkError("names somebody")
    return "well"


def chosen(slate, ejected=()):
    slate.list()
    found = slate.choose(ORDER, ejected, follows)
    return found and (found[0].link.peer, found[1])


@pytest.fixture
def slate(place):
    return Slate(place, "asked", 1, BEGAN)


def test_the_first_in_the_order_counts_at_once(place, slate, clock):
    assert chosen(slate) is None
    put_link(place, 2, 1_004)
    assert chosen(slate) == (2, "well")


def test_a_slot_is_its_peers_alone(place, slate, clock):
    put(place.store, slots.of_peer(1, 2, "asked"), b"x" * place.link_bytes, 1_000)
    put_link(place, 0, 1_007, key=KEYS[3])  # signed by another peer, for itself
    put_link(place, 3, 1_014, key=KEYS[1], body=link(1))  # another's own
    assert chosen(slate) is None and [*slate.refused] == []
    put_link(place, 1, 1_021)
    clock.now = 99.0
    assert chosen(slate) is None  # seen just now
    clock.now += 12
    assert chosen(slate) == (1, "well")


def test_a_link_before_its_turn_is_as_if_it_was_not_there(place, slate, clock):
    put_link(place, 0, 1_006)
    put_link(place, 3, 999, asked=(1,))
    assert chosen(slate) is None and [*slate.refused] == []
    put_link(place, 2, 1_003)
    assert chosen(slate) == (2, "well")


@pytest.mark.parametrize(("late", "counts"), [(1_008, 2), (1_009, 2), (1_010, 0)])
def test_one_that_comes_before_may_be_seen_after_another(place, slate, clock, late, counts):
    put_link(place, 0, 1_009)
    assert chosen(slate) is None
    put_link(place, 2, late)
    clock.now = 11.5
    assert chosen(slate) == (counts, "well")


@pytest.mark.parametrize("name", ["rounds/00000001/003.payload", "rounds/00000002/003.record"])
def test_later_objects_show_that_nothing_can_come_before_it(place, slate, clock, name):
    put_link(place, 0, 1_009)
    put(place.store, name, b"x", 1_019)
    assert chosen(slate) is None
    os.utime(place.store.root / name, (1_020, 1_020))
    assert chosen(slate) == (0, "well")


def test_refused_links_are_passed_over_in_their_order(place, slate, clock):
    put_link(place, 2, 1_001, asked=(1,))
    put_link(place, 0, 1_008, asked=(2,))
    put_link(place, 1, 1_025)
    put_link(place, 3, 1_016, asked=(1,))
    assert chosen(slate) is None and [*slate.refused] == [2, 0]
    assert slate.refused_earlier() == []  # of the same second, for all that one knows
    clock.now = 12.0
    assert chosen(slate) == (1, "well")
    assert [*slate.refused] == slate.refused_earlier() == [2, 0, 3]


@pytest.mark.parametrize("other", [{"run": "ee" * 32}, {"round": 2}])
def test_a_link_of_another_slot_is_no_word_of_its_signer(place, slate, clock, other):
    """Whoever may write in a peer's slot could copy it there from another run or round."""
    put_link(place, 2, 1_001, **other)
    put_link(place, 0, 1_008)
    clock.now = 12.0
    chosen(slate)
    clock.now = 24.0
    assert chosen(slate) == (0, "well")
    assert [*slate.refused] == []


# ---- Who begins with a state ----


def test_of_several_links_the_one_counts_on_which_most_peers_have_built(place):
    """One peer has a slot in each round, and so can put a chain of its own."""
    begun = place.head.sha256

    def chain(rounds, seconds):
        previous = begun
        for step, peer in rounds:
            said = round_link({}, peer=peer, round=step, previous=previous)
            content = sign(said, KEYS[peer], place.link_bytes)
            put(place.store, slots.of_peer(step, peer, "closed"), content, seconds + step)
            previous = hashlib.sha256(content).hexdigest()

    chain([(1, 3), (2, 3), (3, 3)], BEGAN)  # early, so that it costs it nothing
    chain([(1, 0)], BEGAN + 100)
    following = "closed", 1, place.head, ()
    assert LateJoiner(place, None, None)._following(*following) is None  # nobody can tell yet
    shutil.rmtree(place.store.root / slots.round_folder(1))
    chain([(1, 0), (2, 1), (3, 2)], BEGAN + 200)
    chain([(1, 3)], BEGAN)
    assert LateJoiner(place, None, None)._following(*following).link.peer == 0


def put_closed(place, peer, said, seconds):
    content = sign(said, KEYS[peer], place.link_bytes)
    put(place.store, slots.of_peer(said.round, peer, "closed"), content, seconds)


BEFORE = driver.ask(started(LONG, 6, reports=SharedStore()), range(5))
ALLOWED = {"applied": ()}  # where nobody sent a message


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, 1),
        ({"left": (5,)}, 0),  # no member
        ({"asked": (5,)}, 1),
        ({"asked": (6,)}, 0),  # of 6 peers
        ({"applied": (0,)}, 0),
        ({"messages": {5: links.linked({0: counted(0)})[0][0]}}, 0),  # it was assigned nothing
    ],
)
def test_a_link_that_no_run_allows_ends_what_is_followed(place, changes, passed):
    said = round_link({}, previous=place.head.sha256, **ALLOWED | changes)
    put_closed(place, 0, said, BEGAN + 50)
    assert len([*LateJoiner(place, None, None)._passed(BEFORE, "44" * 32)]) == passed


def test_a_link_counts_once_enough_peers_have_trained_on_it(place):
    place.document = SimpleNamespace(slots=4, payload_bytes=9, run={"config": {"min_clients": 3}})
    passed = SimpleNamespace(progress=BEFORE, link=round_link({}), head=place.head)

    def is_trained_on_after(peer, **changes):
        body = counted(peer).body.model_copy(update={"base": passed.link.params} | changes)
        record = sign(body, KEYS[peer], slots.RECORD_BYTES)
        put(place.store, slots.of_peer(1, peer, "record"), record, BEGAN + 5)
        return LateJoiner(place, None, None)._is_trained_on(passed)

    assert not is_trained_on_after(0)
    assert not is_trained_on_after(1)
    assert not is_trained_on_after(2, base="00" * 32)  # of other params
    assert is_trained_on_after(3)


@pytest.mark.parametrize("changes", [{"base": "00" * 32}, {"span": (0, 0)}, {"key": 0}])
def test_only_what_follows_from_the_link_counts_and_only_with_its_peers_key(place, changes):
    place.document = SimpleNamespace(slots=4, payload_bytes=9, run={"config": {"min_clients": 1}})
    passed = SimpleNamespace(progress=BEFORE, link=round_link({}), head=place.head)
    key = changes.pop("key", 1)
    body = counted(1).body.model_copy(update={"base": passed.link.params} | changes)
    record = sign(body, KEYS[key], slots.RECORD_BYTES)
    put(place.store, slots.of_peer(1, 1, "record"), record, BEGAN + 5)
    assert not LateJoiner(place, None, None)._is_trained_on(passed)


# ---- A run that waits ----


def test_a_link_names_nobody_who_asked_in_its_second_or_later(place):
    """Or it would be false for who looked before the notice came, and true for who looked later."""
    waiting = driver.ask(started(LONG, 5, reports=SharedStore()), range(4))
    joins = {4: 1_005}
    order = turns.turns_to_begin(waiting, joins, place.head, TERMS, 5)
    link = AskedLink(run=RUN, round=1, peer=4, previous=place.head.sha256, asked=(4,))
    after = partial(Waiting(place, None)._after, waiting, joins, order.since, link)
    assert not after(1_006).waiting
    with pytest.raises(FalseLinkError, match="asked"):
        after(1_005)


def test_links_of_ejected_peers_are_not_looked_at(place, slate, clock):
    put_link(place, 2, 1_001, asked=(1,))
    put_link(place, 0, 1_008)
    clock.now = 12.0
    chosen(slate, [2])
    clock.now = 24.0
    assert chosen(slate, [2]) == (0, "well")
    assert [*slate.refused] == []
