"""Followers of a run that is over: one that begins with a state, one to which the store lied."""

import shutil
from pathlib import Path

import pytest
import tomlkit

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from parts.volunteers import layout, stored_verification
from parts.volunteers.chain import statements
from parts.volunteers.store.folder import FolderStore
from tests import tiny
from tests.errors import check_names
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long

LAST, PEERS = 8, 2
STATES = {"config__total_steps": LAST, "witness__snapshot_every": 2}


@pytest.fixture(scope="module")
def over(tmp_path_factory):
    """Folder of a run that two volunteers have taken."""
    folder = tmp_path_factory.mktemp("over")
    volunteering.opened(folder, PEERS, **STATES)
    volunteering.train_all(folder, ("000", "001"))
    return folder


@pytest.fixture
def store(over, tmp_path):
    """A copy of its store, times included."""
    shutil.copytree(over / "store", tmp_path / "store")
    return tmp_path / "store"


def follow(over: Path, store: Path, **runtime: object) -> tuple[list[dict], tuple, str]:
    """A follower's rounds, the hashes of its last state, and what it printed."""
    root = store.parent / "root"
    shutil.copytree(over / "follower", root, ignore=shutil.ignore_patterns("trained", "runs"))
    run = tomlkit.parse((root / "run.toml").read_text())
    run["runtime"] |= {"store": f"file://{store}", **runtime}
    (root / "run.toml").write_text(tomlkit.dumps(run))
    said = tiny.make(root / "run.toml", root, "train")
    return *of(store.parent, "root"), said


def of(folder: Path, name: str) -> tuple[list[dict], tuple]:
    """The rounds of a volunteer, and the hashes of its last state."""
    transcript = Transcript(volunteering.transcript(folder, name))
    state = transcript.hashes(transcript.snapshots[-1])
    return volunteering.rounds(folder, name), (state.params, state.shared)


def of_round(store: Path, step: int, end: str) -> list[Path]:
    return sorted((store / layout.round_folder(step)).glob(f"*.{end}"))


def test_a_state_that_is_missing_or_damaged_is_passed_over_for_an_older_one(over, store, capsys):
    put = sorted(store.glob("states/*/*/index"))
    assert [path.parts[-3] for path in put] == [f"{step:08}" for step in (2, 4, 6, 8)]
    size = statements.read_run(FolderStore(store))[0].state_bytes
    assert {p.with_name("0000").stat().st_size for p in put} == {size}  # as addresses have it
    put[2].unlink()  # who closed the round put none
    chunk = put[1].with_name("0000")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    for path in (*of_round(store, 1, "payload"), *of_round(store, 2, "payload")):
        path.unlink()  # so nobody can merge these rounds
    rounds, state, said = follow(over, store, from_state=True)
    expected, end = of(over, "000")
    assert state == end
    assert [one["decision"] for one in rounds] == [one["decision"] for one in expected]
    assert rounds[3:] == expected[3:]  # the third has a held-out loss
    said += capsys.readouterr().err
    assert "no state after round 6" in said and "no state after round 4" in said


def test_a_follower_without_a_state_begins_at_the_start(over, store):
    shutil.rmtree(store / "states")
    rounds, state, _ = follow(over, store, from_state=True)
    assert (rounds, state) == of(over, "000")


def test_a_training_that_no_link_can_follow_ends_with_what_verify_says(over, store):
    for path in of_round(store, 4, "closed"):
        path.unlink()
    with pytest.raises(LockstepError) as caught:
        follow(over, store)
    check_names(caught.value, layout.round_folder(4), "no link follows", "[0, 1]")
    with tiny.like_a_process(), pytest.raises(LockstepError) as verified:
        stored_verification.verify(f"file://{store}", store.parent, [], bool, follows=False)
    assert str(verified.value) == str(caught.value)


def test_a_follower_goes_back_from_a_second_winner(over, store, monkeypatch):
    (first,) = of_round(store, 4, "closed")
    other, later = 1 - int(first.name[:3]), first.stat().st_mtime + 60
    second = volunteering.sign_anew(over, first, later, peer=other)
    followed, hidden = [], first.relative_to(store).as_posix()
    look, names = FolderStore.look, FolderStore.names

    def hides() -> bool:  # until somebody has seen the other, and looks for what follows
        seen = [*followed]
        while seen and not seen.pop(0).endswith(second.relative_to(store).as_posix()):
            pass
        return not any(name.startswith(layout.round_folder(5)) for name in seen)

    def look_there(self, name, most):
        if name.endswith(".closed"):
            followed.append(name)
        return None if name == hidden and hides() else look(self, name, most)

    def names_there(self, prefix, *most):
        found = names(self, prefix, *most)
        return {n: s for n, s in found.items() if n != hidden or not hides()}

    monkeypatch.setattr(FolderStore, "look", look_there)
    monkeypatch.setattr(FolderStore, "names", names_there)
    rounds, state, _ = follow(over, store)
    assert (rounds, state) == of(over, "000")
    names = [name for name in followed if name.startswith(layout.round_folder(4))]
    assert second.relative_to(store).as_posix() in names
    later = [n for n, name in enumerate(followed) if name.startswith(layout.round_folder(5))]
    assert hidden in followed[later[0] :]  # it went back
