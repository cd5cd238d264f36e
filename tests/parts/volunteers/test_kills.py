"""Volunteers that are killed at any moment, and started again: one chain, one hash."""

import os
import random
import signal
import time

import pytest

from parts.volunteers import layout
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.signed import unsigned
from tests.parts.volunteers import volunteering
from tests.parts.volunteers.stores import opened

pytestmark = pytest.mark.soak  # rounds of a few seconds: an idle machine takes them
NAMES = [f"{peer:03}" for peer in range(8)]
SHORT = {
    "peers__bits": "everywhere",
    "config__total_steps": 8,
    "config__init_min_clients": 2,
    "config__min_clients": 1,
    "config__max_round_train_time": 4,
    "config__warmup_time": 1,
    "config__epoch_time": 20,
}

STEADY = {"config__total_steps": 30, "config__max_round_train_time": 15}
MANY = {"config__total_steps": 120, "config__max_round_train_time": 8}

# Runs stage train of a volunteer. Who puts the first object of each kind is killed after it.
KILLED_AFTER_A_WRITE = """
import os, sys
from pathlib import Path
from parts.volunteers.store.folder import FolderStore

create, kinds = FolderStore.create, Path(sys.argv.pop(1))

def killed(store, name, content):
    done = create(store, name, content)
    kind = name.rpartition(".")[2] if name.startswith("rounds/") else name.partition("/")[0]
    try:
        if done:
            (kinds / kind).touch(exist_ok=False)
            os.kill(os.getpid(), 9)
    except FileExistsError:
        pass
    return done

FolderStore.create = killed
from pipeline.__main__ import main
main()
"""


def closed(folder, step):
    files = (folder / "store" / layout.round_folder(step)).glob("*.closed")
    return [unsigned(RoundLink, file.read_bytes(), "") for file in files]


def goes_on(folder, names, seconds, *python, kills=0, between=(1, 6)):
    """Train until all end, and start each again when it was killed; return how often that was.

    `kills` is how often this kills one of them, `between` how many seconds apart.
    """
    rng, done, killed = random.Random(0), 0, 0
    there = {name: volunteering.train(folder, name, *python) for name in names}
    until, next_kill = time.monotonic() + seconds, time.monotonic() + 20
    try:
        while there and time.monotonic() < until:
            time.sleep(0.2)
            if done < kills and time.monotonic() > next_kill:
                os.killpg(there[rng.choice([*there])].pid, 9)
                done, next_kill = done + 1, time.monotonic() + rng.uniform(*between)
            for name, process in [*there.items()]:
                status = process.poll()
                if status == 0:
                    del there[name]
                elif status is not None:
                    assert status == -9, volunteering.output(folder)
                    there[name] = volunteering.train(folder, name, *python)
                    killed += 1
        assert not there, volunteering.output(folder)
    finally:
        volunteering.ended([*there.values()], 0.1) if there else None
    assert volunteering.rounds(folder, *names)
    return killed


def test_killed_volunteers_end_with_one_chain(tmp_path):
    volunteering.opened(tmp_path, 3, alone=True, **SHORT)
    assert goes_on(tmp_path, NAMES[:3], 300, kills=8)


@pytest.mark.parametrize("kind", ["moto", "ceph"])
def test_eight_volunteers_killed_a_hundred_times_end_with_one_chain(
    kind, tmp_path, monkeypatch, request
):
    address = request.getfixturevalue("ceph") if kind == "ceph" else ""
    with opened(kind, tmp_path, monkeypatch, address) as store:
        volunteering.opened(tmp_path, 8, alone=True, store=store.address, **SHORT | MANY)
        assert goes_on(tmp_path, NAMES, 2400, kills=100, between=(4, 12)) == 100


def test_volunteers_killed_after_each_kind_of_write_end_with_one_chain(tmp_path):
    (kinds := tmp_path / "kinds").mkdir()
    volunteering.opened(tmp_path, 3, alone=True, **SHORT | STEADY)
    killed = goes_on(tmp_path, NAMES[:3], 600, "-c", KILLED_AFTER_A_WRITE, kinds)
    found = {file.name for file in kinds.iterdir()}
    assert found >= {"join", "asked", "payload", "record", "closed", "states", "own"}
    assert killed == len(found)


def test_volunteer_that_is_asked_to_stop_leaves_after_its_message(tmp_path):
    volunteering.opened(tmp_path, 2, alone=True, **SHORT | STEADY)
    second = tmp_path / "store" / "rounds" / "00000002"
    there = [volunteering.train(tmp_path, name) for name in ("000", "001")]
    try:
        until = time.monotonic() + 240
        while not (second / "001.record").exists() and time.monotonic() < until:
            time.sleep(0.05)
        there[1].terminate()
        assert there[1].wait(60) == 128 + signal.SIGTERM, volunteering.output(tmp_path)
        while not (notices := [*second.parent.glob("*/001.leave")]) and time.monotonic() < until:
            time.sleep(0.1)
        step = int(notices[0].parent.name)
        while not closed(tmp_path, step + 1) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        os.killpg(there[0].pid, 9)
        volunteering.ended(there, 10)
    links = [closed(tmp_path, s)[0] for s in (step, step + 1)]
    assert [*links[0].messages] == [0, 1]
    assert 1 not in links[1].messages
    assert links[0].left in ((1,), ())  # who closed it may not have seen that
