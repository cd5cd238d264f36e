"""Who has addresses and no share in a run: what it may put holds nobody up."""

import json

import pytest

from parts.volunteers.chain.statements import read_run
from parts.volunteers.store import addresses
from parts.volunteers.store.schemes import open_store
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long

PEERS, LAST = 3, 4
NAMES = "000", "001", "follower"


def test_bytes_that_nobody_signed_hold_no_round_up(tmp_path):
    address = volunteering.opened(
        tmp_path, PEERS, config__init_min_clients=2, config__total_steps=LAST
    )
    store = open_store(address)
    reader = addresses.AddressReader(2, None, "", read_run(store)[0])
    for step in range(1, LAST + 1):  # all that peer 2 has addresses for
        for ask in addresses.own_puts(reader, step):
            assert store.create(ask.name, b"x" * ask.size)
    started = [volunteering.train(tmp_path, name) for name in NAMES]
    assert volunteering.ended(started, 240) == [0] * len(NAMES), volunteering.output(tmp_path)
    found = {(volunteering.transcript(tmp_path, n) / "rounds.jsonl").read_text() for n in NAMES}
    assert len(found) == 1
    applied = [json.loads(line)["decision"]["applied"] for line in found.pop().splitlines()]
    assert applied == [[0, 1]] * LAST
