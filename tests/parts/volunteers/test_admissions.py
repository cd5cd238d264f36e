"""Who has which slot, for who may list a store and for who may only read it."""

import os

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.wire import message as wire
from parts.volunteers import commands, keys, layout
from parts.volunteers.bodies import Admission, RunDocument
from parts.volunteers.chain import statements
from parts.volunteers.chain.statements import Admissions
from parts.volunteers.lab import opening, signing
from parts.volunteers.signed import sign
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.store.schemes import open_store
from pipeline.net import limits
from tests.errors import refused
from tests.parts.volunteers.stores import BUCKET

LAB, FIRST, SECOND = (keys.PrivateKey.generate() for _ in range(3))


class Unlisted(FolderStore):
    """A folder that only its owner may list."""

    def names(self, prefix, most=0):
        raise LockstepError("found no address for LIST")


class Gone(FolderStore):
    """A store that does not answer."""

    def names(self, prefix, most=0):
        raise limits.UnreachableError("timed out")


OF_RUN = {
    "config": {"max_round_train_time": 600, "total_steps": 9, "min_clients": 1},
    "witness": {"snapshot_every": 4, "keep_every": 1},
}
IN_HOURS = {"max_round_train_time": 3600, "total_steps": 99, "min_clients": 1}


def run_in(store, lab=LAB, **tables):
    document = RunDocument(
        release="1", run=OF_RUN | tables,
        pins={}, start="ab" * 32, slots=16, payload_bytes=5000, own_bytes=7, state_bytes=0,
        self_test=None,
        lab=keys.public_text(lab),
    )  # fmt: skip
    store.create(layout.RUN, sign(document, lab))
    return statements.read_run(store)[1]


@pytest.fixture
def store(tmp_path):
    """A store in which slot 7 was the first's, from second 2000 on the second's, then nobody's."""
    store = FolderStore(tmp_path)
    run_in(store)
    for seconds, key in ((1000, FIRST), (2000, SECOND), (3000, None)):
        name = opening.admit(store, 7, key and keys.public_text(key), LAB, "because")
        os.utime(store.root / name, (seconds, seconds))
    opening.admit(store, 2, keys.public_text(SECOND), LAB)
    return store


@pytest.mark.parametrize("kind", [FolderStore, Unlisted])
def test_who_may_not_list_reads_the_same(store, kind):
    run = statements.read_run(store)[1]
    found = Admissions(kind(store.root), run, LAB.public_key(), 16)
    found.read()
    times = (1000, 1001, 2000, 2001, 3000, 3001)
    expected = [None, FIRST, FIRST, SECOND, SECOND, None]
    assert [found.key(7, at) for at in times] == [key and key.public_key() for key in expected]
    assert found.newest(7) is None and found.slot_of(SECOND.public_key()) == 2
    with pytest.raises(LockstepError, match="^ed25519:.*: has no slot in "):
        found.slot_of(FIRST.public_key())
    name = opening.admit(store, 5, keys.public_text(FIRST), LAB)
    found.read()
    assert name == "peers/005/000.json" and found.slot_of(FIRST.public_key()) == 5


def test_a_reason_is_as_a_statement_has_it_and_where_nobody_has_a_slot_nothing_is_signed(store):
    for because in ("", "b" * 201):
        with refused("because"):
            opening.admit(store, 2, None, LAB, because)
    opening.admit(store, 2, None, LAB)
    assert signing.sign_run(store, LAB, 1).startswith("nothing")


def test_a_store_that_does_not_answer_is_not_taken_for_one_that_lists_nothing(store):
    with pytest.raises(limits.UnreachableError):
        Admissions(Gone(store.root), "ab" * 32, LAB.public_key(), 16).read()


@pytest.mark.parametrize(
    ("author", "changes"),
    [(SECOND, {}), (LAB, {"peer": 4}), (LAB, {"number": 1}), (LAB, {"run": "cd" * 32}), (None, {})],
)
def test_what_the_lab_did_not_say_of_a_slot_is_passed_over(store, author, changes):
    """Whoever may write a name could else stop all who read it, for good."""
    run = statements.read_run(store)[1]
    said = {"run": run, "peer": 3, "number": 0, "key": keys.public_text(FIRST)} | changes
    content = b"\xff" if author is None else sign(Admission(**said), author)
    for peer, number in ((3, 0), (7, 3)):
        store.create(name := layout.admission(peer, number), content)
        os.utime(store.root / name, (4000, 4000))
    found = Admissions(store, run, LAB.public_key(), 16)
    found.read()
    assert (found.newest(3), found.newest(7)) == (None, None)
    assert found.key(7, 2500) == SECOND.public_key()
    assert opening.admit(store, 3, keys.public_text(FIRST), LAB) == layout.admission(3, 0)
    found.read()
    assert found.newest(3) == FIRST.public_key()


def test_whoever_fills_a_slots_names_keeps_the_lab_from_nothing(store):
    """Copies of what the lab said elsewhere are nothing either."""
    run = statements.read_run(store)[1]
    copied = store.look(layout.admission(2, 0), 2**20).content
    for number in range(1, 1000):
        store.create(layout.admission(2, number), copied if number % 2 else b"junk")
    found = Admissions(store, run, LAB.public_key(), 16)
    found.read()
    assert found.newest(2) == SECOND.public_key()
    assert opening.admit(store, 2, None, LAB, "a liar") == layout.admission(2, 1)
    found.read()
    assert found.newest(2) is None
    for _ in range(2):  # and it may be given again
        opening.admit(store, 2, keys.public_text(FIRST), LAB)
    found.read()
    assert (found.newest(2), found.statements(2)) == (FIRST.public_key(), 4)


def test_of_two_admissions_at_once_neither_takes_the_others_away(store):
    first = dict.fromkeys([0])

    class Slow(FolderStore):
        """A store in which another process of the lab admits, after this one has read."""

        def names(self, prefix, most=0):
            found = super().names(prefix, most)
            for _ in [*first]:
                first.clear()
                opening.admit(store, 5, keys.public_text(FIRST), LAB, "the first")
            return found

    assert opening.admit(Slow(store.root), 5, None, LAB, "the second") == layout.admission(5, 1)
    found = Admissions(store, statements.read_run(store)[1], LAB.public_key(), 16)
    found.read()
    assert (found.statements(5), found.newest(5)) == (2, None)


P = 2**255 - 19
ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
SMALL = [*(0, 1, P - 1, ORDER_8, P - ORDER_8), *(P, P + 1)]


@pytest.mark.parametrize("sign_of_x", [0, 2**255])
@pytest.mark.parametrize("y", SMALL)
def test_a_key_of_small_order_is_nobodys(store, tmp_path, y, sign_of_x):
    """Anybody can sign for it, and nothing is sealed for it, which would stop `sign` for all."""
    weak = keys.SCHEME + (y + sign_of_x).to_bytes(32, "little").hex()
    with pytest.raises(LockstepError, match="expected a key"):
        opening.admit(store, 4, weak, LAB)
    assert store.look(layout.admission(4, 0), 1) is None
    other = FolderStore(tmp_path / "other")
    run_in(FolderStore(tmp_path / "like"))
    said = (
        (tmp_path / "like" / layout.RUN)
        .read_bytes()
        .replace(keys.public_text(LAB).encode(), weak.encode())
    )
    other.create(layout.RUN, said)
    with pytest.raises(LockstepError, match="a point of small order, expected a key"):
        statements.read_run(other)


def test_a_key_that_has_a_slot_gets_no_other(store):
    """Its owner would take whichever comes first."""
    with pytest.raises(LockstepError, match="has slot 2"):
        opening.admit(store, 1, keys.public_text(SECOND), LAB)
    opening.admit(store, 2, keys.public_text(SECOND), LAB)


def test_a_slot_is_given_with_a_days_addresses_and_sign_gives_more_to_all(bucket, tmp_path, capsys):
    lab, store = keys.create(tmp_path / "lab.pem"), open_store(f"s3://{BUCKET}/run")
    run_in(store, lab, config=IN_HOURS)
    for peer in (5, 3):
        commands.key(tmp_path / f"{peer}.pem")
        public = capsys.readouterr().out.splitlines()[-1]
        commands.admit(store.address, peer, public, None, tmp_path / "lab.pem")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "admit: peers/003/000.json", "admit: signed rounds 1 to 30 of 1 peers, for 24 hours",
    ]  # fmt: skip
    commands.sign(store.address, 2.0, tmp_path / "lab.pem")
    assert capsys.readouterr().out == "sign: rounds 1 to 3 of 2 peers, for 2 hours\n"
    assert {*store.names("addresses/")} == {
        layout.addresses(peer, number) for peer in (3, 5) for number in range(3)
    }
    commands.admit(store.address, 5, None, "asked to", tmp_path / "lab.pem")
    commands.sign(store.address, 2.0, tmp_path / "lab.pem")
    assert capsys.readouterr().out.splitlines()[-1].startswith("sign: rounds 1 to 3 of 1 peers")


def test_a_run_whose_messages_are_too_long_is_refused():
    like = {"w": np.arange(4, dtype=np.float32)}
    form = wire.Form(like, {"w": 0}, "lockstep", 4)
    assert opening.payload_bytes(form, 32) == 32 == len(wire.encode(like, form))
    with pytest.raises(
        LockstepError, match=r"\[volunteers\] most_bytes is 31, expected at least 32"
    ):
        opening.payload_bytes(form, 31)
