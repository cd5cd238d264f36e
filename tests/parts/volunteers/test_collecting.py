"""What the lab removes of a finished run, and what its followers say then."""

import shutil

import pytest

from lockstep.errors import LockstepError, RequestError
from parts.volunteers import keys, stored_verification
from parts.volunteers.chain import statements
from parts.volunteers.lab import collecting
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.store.schemes import open_store
from tests import tiny
from tests.parts.volunteers import test_admissions


@pytest.fixture
def store(finished, tmp_path):
    return open_store(f"file://{shutil.copytree(finished / 'store', tmp_path / 'store')}")


@pytest.fixture
def lab(finished):
    return keys.read(finished / "lab.pem")


def names(store):
    return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*.*")} | {
        path.relative_to(store.root).as_posix() for path in store.root.glob("own/*/*/*")
    }


@pytest.mark.long
def test_nothing_goes_that_is_new_or_that_an_audit_waits_for(store, lab):
    before = names(store)
    assert "nothing" in collecting.collect(store, lab)
    assert names(store) == before
    with pytest.raises(LockstepError, match="its lab is ed25519:"):
        collecting.collect(store, keys.PrivateKey.generate())


@pytest.mark.long
def test_old_payloads_and_states_go_and_a_follower_says_what_it_cannot_prove(
    store, lab, tmp_path, monkeypatch
):
    monkeypatch.setattr(collecting, "_old", lambda *_: 3)
    before = names(store)
    for folder, stays in (("00000002", False), ("00000003", True)):
        (store.root / "own" / folder / "001").mkdir(parents=True, exist_ok=True)
        (store.root / "own" / folder / "001" / "0000").write_bytes(b"x")
        before |= {f"own/{folder}/001/0000"} if stays else set()
    collecting.collect(store, lab)
    payloads = {f"rounds/{n:08}/{p:03}.payload" for n in (1, 2, 3) for p in range(3)}
    assert names(store) == before - payloads | {"collected/0000.json"}
    run = statements.read_run(store)[1]
    assert [one.round for one in statements.collected_notices(store, run, lab.public_key())] == [3]
    with tiny.like_a_process(), pytest.raises(RequestError, match="rounds 1 to 3"):
        stored_verification.verify(store.address, tmp_path, [], print, follows=False)


def test_names_and_notices_of_others_neither_stop_the_lab_nor_go(tmp_path, monkeypatch):
    store, lab = FolderStore(tmp_path), test_admissions.LAB
    run = test_admissions.run_in(store)
    monkeypatch.setattr(collecting, "_old", lambda *_: 3)
    junk = {"collected/0000.json", "collected/0002.json", "states/x/y", "own/00000001/1/index"}
    junk |= {"rounds/00000001/x.payload"}
    for name in (*junk, "rounds/00000001/001.payload", "states/00000002/001/index"):
        assert store.create(name, b"x")
    assert "2 objects" in collecting.collect(store, lab)
    notices = statements.collected_notices(store, run, lab.public_key())
    assert [one.round for one in notices] == [3]  # as the lab signed it
    left = {*store.names("rounds/"), *store.names("states/"), *store.names("own/")}
    assert left == {name for name in junk if not name.startswith("collected")}
