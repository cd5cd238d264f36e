"""What a round asks of a store, by addresses that the lab signed."""

import re
from collections import Counter
from pathlib import Path

import pytest

from parts.volunteers import keys
from parts.volunteers.lab import signing
from parts.volunteers.store.schemes import open_store
from tests.parts.volunteers import volunteering
from tests.parts.volunteers.stores import BUCKET, running_public, without_credentials

pytestmark = pytest.mark.soak  # a busy machine takes longer rounds, and looks more often
LAST = 12
MEMORY = [x.split() for x in Path("/proc/meminfo").read_text().splitlines() if "Total:" in x]
KILOBYTES = sum(int(size) for name, size, *_ in MEMORY if name in ("MemTotal:", "SwapTotal:"))
TOO_SMALL = pytest.mark.skipif(KILOBYTES < 40e6, reason="64 processes take 40 GB, swap included")


@pytest.mark.parametrize("peers", [4, 8, pytest.param(64, marks=TOO_SMALL)])
def test_a_peer_asks_little_in_a_round(tmp_path, monkeypatch, peers):
    with running_public(monkeypatch) as bucket:
        by = f"{bucket.address}/{BUCKET}/run"
        volunteering.opened(
            tmp_path, peers, store=f"s3://{BUCKET}/run", by=by, config__total_steps=LAST
        )
        lab = keys.read(tmp_path / "lab.pem")
        signing.sign_run(open_store(f"s3://{BUCKET}/run"), lab, 4)  # for all rounds
        without_credentials(monkeypatch)
        volunteering.train_all(tmp_path, [f"{peer:03}" for peer in range(peers)], 3600)
        asked = [(verb, path) for verb, path, _ in bucket.seen]
    puts = [n for n, (verb, path) in enumerate(asked) if verb == "PUT" and ".closed" in path]
    steps = [int(re.search(r"rounds/(\d{8})/", asked[n][1])[1]) for n in puts]
    first, last = (puts[steps.index(step)] for step in (2, LAST))
    counts = Counter(
        "LIST"
        if "list-type=2" in path
        else (re.findall(r"/states/|/own/|\.shown", path) or [verb])[0]
        for verb, path in asked[first:last]
    )
    of_each = {kind: count / peers / (LAST - 2) for kind, count in counts.items()}
    print(of_each)  # "own" are states of windows that are drawn for audits, as all first ones are
    assert counts["/states/"] == 2 * 3  # the index and one chunk, after rounds 3, 6 and 9
    assert of_each["PUT"] <= 2 + 1 / peers
    # this round and the next, and who closes it once more; a busy machine's rounds more often
    assert of_each["LIST"] < 3
    assert of_each["GET"] <= 2 * peers + 4  # of each peer a record and a payload
