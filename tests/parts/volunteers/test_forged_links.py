"""Stores of which somebody changed an object for a reader, or for everybody."""

import os
import shutil

import pytest

from parts.volunteers import joining, keys, layout
from parts.volunteers.bodies import LeaveNotice
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.signed import sign, unsigned
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.training.process import Onlooker
from tests import tiny
from tests.parts.volunteers import volunteering
from tests.parts.volunteers.volunteering import FINISHED

pytestmark = pytest.mark.long

STEP, PEERS = 3, len(FINISHED) - 1


@pytest.fixture
def store(finished, tmp_path):
    """A copy of a finished run, times included, up to the round whose link is forged."""
    store = shutil.copytree(finished / "store", tmp_path / "store")
    for step in range(STEP + 1, 7):
        shutil.rmtree(store / layout.round_folder(step))
    return store


def followed(store, root):
    """How many rounds a reader follows."""
    with tiny.like_a_process():
        followed = joining.follow(f"file://{store}", root, Onlooker(False, bool))
    return len(followed.transcript.rounds)


@pytest.mark.parametrize(("later", "rounds"), [(-1, STEP), (0, STEP - 1), (5, STEP - 1)])
def test_link_that_names_a_notice_before_it_is_there_is_false_for_ever(
    finished, store, tmp_path, later, rounds
):
    (path,) = (store / layout.round_folder(STEP)).glob("*.closed")
    link, at = unsigned(RoundLink, path.read_bytes(), ""), int(path.stat().st_mtime)
    volunteering.sign_anew(finished, path, at, left=(link.peer,))
    notice = store / layout.of_peer(STEP, link.peer, "leave")
    said = LeaveNotice(run=link.run, round=STEP, peer=link.peer)
    key = keys.read(finished / f"{link.peer:03}" / "key.pem")
    notice.write_bytes(sign(said, key, layout.LEAVE_BYTES))
    os.utime(notice, (at + later, at + later))
    assert followed(store, tmp_path) == rounds


def test_reader_who_does_not_wait_ends_where_a_link_does_not_count(finished, store, tmp_path):
    (path,) = (store / layout.round_folder(STEP)).glob("*.closed")
    peer = 1 - int(path.name[:3]) % 2  # another one's, which is before its turn
    volunteering.sign_anew(finished, path, path.stat().st_mtime - 100, peer=peer)
    path.unlink()
    assert followed(store, tmp_path) == STEP - 1


def test_link_that_names_another_before_it_has_nobody_read_messages_again(
    finished, store, tmp_path, monkeypatch
):
    """It costs its signer nothing: it may come before its turn."""
    (path,) = (store / layout.round_folder(STEP)).glob("*.closed")
    peer = (int(path.name[:3]) + 1) % PEERS
    volunteering.sign_anew(finished, path, 1000, peer=peer, previous="ee" * 32)
    looks, look = [], FolderStore.look

    def counted(self, name, most):
        looks.append(name)
        return look(self, name, most)

    monkeypatch.setattr(FolderStore, "look", counted)
    assert followed(store, tmp_path) == STEP
    payloads = [
        n for n in looks if n in {layout.of_peer(STEP - 1, p, "payload") for p in range(PEERS)}
    ]
    assert len(payloads) == PEERS
