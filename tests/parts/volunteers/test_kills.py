"""Volunteers that are killed at any moment, and started again: one chain, one hash."""

import os
import random
import time

from tests.parts.volunteers import volunteering

PEERS, KILLS = 3, 8


def test_killed_volunteers_end_with_one_chain(tmp_path):
    names = [f"{peer:03}" for peer in range(PEERS)]
    volunteering.opened(
        tmp_path, PEERS, alone=True, config__total_steps=8, config__init_min_clients=2,
        config__min_clients=1, config__max_round_train_time=4, config__warmup_time=1,
        config__epoch_time=20,
    )  # fmt: skip
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
