"""A run whose volunteers have no credentials of its store, in real processes."""

import json

import pytest

from tests.parts.volunteers import volunteering
from tests.parts.volunteers.stores import BUCKET

pytestmark = pytest.mark.long

PEERS = 2
NAMES = [*(f"{peer:03}" for peer in range(PEERS)), "follower"]


def train_without_credentials(folder, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    started = [volunteering.train(folder, name) for name in NAMES]
    assert volunteering.ended(started) == [0] * len(NAMES), volunteering.output(folder)
    rounds = [volunteering.transcript(folder, name) / "rounds.jsonl" for name in NAMES]
    assert len({file.read_bytes() for file in rounds}) == 1
    lines = [json.loads(line) for line in rounds[0].read_text().splitlines()]
    assert all(len(line["decision"]["applied"]) == PEERS for line in lines)
    return lines


def test_they_end_alike_by_addresses_that_the_lab_signed(tmp_path, monkeypatch, bucket):
    by = f"{bucket.address}/{BUCKET}/run"
    volunteering.opened(tmp_path, PEERS, store=f"s3://{BUCKET}/run", by=by)
    before = len(bucket.seen)
    lines = train_without_credentials(tmp_path, monkeypatch)
    asked = bucket.seen[before:]
    assert all(said is None for _, _, said in asked)  # no Authorization
    puts = [path for verb, path, _ in asked if verb == "PUT"]
    assert all("X-Amz-Signature=" in path for path in puts)
    assert len(puts) >= 2 * PEERS * len(lines)


@pytest.mark.soak
def test_they_end_alike_over_ceph(tmp_path, monkeypatch, ceph):
    from tests.parts.volunteers.test_ceph import let_all_read, opened

    with opened("ceph", tmp_path, monkeypatch, ceph) as store:
        let_all_read()
        by = f"{ceph}/{store.address.removeprefix('s3://').replace(' ', '%20')}"
        volunteering.opened(tmp_path, PEERS, store=store.address, by=by)
        train_without_credentials(tmp_path, monkeypatch)
