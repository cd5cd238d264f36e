"""Volunteers that are killed at any moment, and started again: one chain, one hash."""

import os
import random
import signal
import time

import pytest

from parts.volunteers import slots
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.signed import unsigned
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.soak  # rounds of a few seconds: an idle machine takes them
PEERS, KILLS = 3, 8
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


def closed(folder, step):
    files = (folder / "store" / slots.round_folder(step)).glob("*.closed")
    return [unsigned(RoundLink, file.read_bytes(), "") for file in files]


def test_killed_volunteers_end_with_one_chain(tmp_path):
    names = [f"{peer:03}" for peer in range(PEERS)]
    volunteering.opened(tmp_path, PEERS, alone=True, **SHORT)
    rng, kills = random.Random(0), 0
    there = {name: volunteering.train(tmp_path, name) for name in names}
    until, next_kill = time.monotonic() + 300, time.monotonic() + 20
    try:
        while there and time.monotonic() < until:
            time.sleep(0.2)
            if kills < KILLS and time.monotonic() > next_kill:
                os.killpg(there[rng.choice([*there])].pid, 9)
                kills, next_kill = kills + 1, time.monotonic() + rng.uniform(1, 6)
            for name, process in [*there.items()]:
                status = process.poll()
                if status == 0:
                    del there[name]
                elif status is not None:
                    assert status == -9, volunteering.output(tmp_path)
                    there[name] = volunteering.train(tmp_path, name)
        assert not there, volunteering.output(tmp_path)
    finally:
        volunteering.ended([*there.values()], 0.1) if there else None
    of_all = [volunteering.transcript(tmp_path, name) for name in names]
    assert kills
    assert len({(one / "rounds.jsonl").read_bytes() for one in of_all}) == 1


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
