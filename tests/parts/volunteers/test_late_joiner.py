"""A volunteer that begins with a state in the store, and trains: real processes, over a folder."""

import json
import shutil
import signal
import time

import pytest
import tomlkit

from lockstep.errors import LockstepError
from parts.publication import publish
from parts.volunteers.chain import signed_rounds
from tests import tiny
from tests.parts.volunteers import volunteering
from tests.parts.volunteers.test_followers import of

pytestmark = pytest.mark.long

LAST, PEERS, EVERY = 16, 3, 2
RUN = {
    "config__total_steps": LAST,
    "config__init_min_clients": 2,
    "config__max_round_train_time": 45,  # in which who stops between two messages is missed
    "witness__snapshot_every": EVERY,
}


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """Folder of a run that peers 0 and 1 begin; 1 leaves, and 2 begins with a state."""
    folder = tmp_path_factory.mktemp("joined")
    volunteering.opened(folder, PEERS, **RUN)
    run = tomlkit.parse((folder / "002" / "run.toml").read_text())
    run["runtime"]["from_state"] = True
    tiny.write_run(folder / "002" / "run.toml", run)
    there = [volunteering.train(folder, name) for name in ("000", "001")]
    until = time.monotonic() + 240
    while not (folder / "store/rounds/00000005/001.record").exists() and time.monotonic() < until:
        time.sleep(0.02)
    there[1].send_signal(signal.SIGTERM)
    there.append(volunteering.train(folder, "002"))
    statuses = volunteering.ended(there, 300)
    assert statuses == [0, 128 + signal.SIGTERM, 0], volunteering.output(folder)
    return folder


def test_who_begins_with_a_state_trains_and_ends_as_others(joined):
    rounds, state = of(joined, "002")
    expected, end = of(joined, "000")
    assert state == end
    assert [one["decision"] for one in rounds] == [one["decision"] for one in expected]
    applied = [one["decision"]["applied"] for one in rounds]
    assert applied[:4] == [[0, 1]] * 4
    assert applied[-1] == [0, 2]


def test_records_of_rounds_before_the_state_are_not_there(joined):
    whole, late = (signed_rounds.check(joined / n / "data" / "trained") for n in ("000", "002"))
    assert whole.signed == whole.messages == late.messages
    assert whole.rounds == late.rounds == LAST
    assert 2 * (LAST - 8) <= late.signed <= 2 * (LAST - 2)


def verdict(joined, name, tmp_path):
    root = shutil.copytree(joined / name, tmp_path / "root")
    tiny.make(root / "run.toml", root, "witness")
    return json.loads((root / "data" / "verdict" / "verdict.json").read_text())


def first_window(joined):
    """The number of the first window in which peer 2 sent a message."""
    rounds, _ = of(joined, "000")
    steps = [one["round"]["step"] for one in rounds if "2" in one["evidence"]["messages"]]
    return (steps[0] - 1) // EVERY


@pytest.mark.parametrize("name", ["000", "002"])
def test_first_window_of_who_came_late_is_replayed_by_anybody(joined, name, tmp_path):
    found = verdict(joined, name, tmp_path)
    assert (found["accepted"], found["findings"], found["not_comparable"]) == (True, [], None)
    replayed = [(one["window"], one["peer"]) for one in found["replayed_windows"]]
    assert (first_window(joined), 2) in replayed
    assert ((0, 0) in replayed) == (name == "000")  # peer 2 has not merged that window


def test_who_began_with_a_state_cannot_publish(joined, tmp_path):
    with pytest.raises(LockstepError, match="from_state"):
        publish.write(tmp_path / "published", joined / "002/run.toml", joined / "002", 1, None)
