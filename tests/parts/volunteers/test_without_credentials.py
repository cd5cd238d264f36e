"""A run whose volunteers have no credentials of its store, in real processes."""

import re

import pytest

from pipeline.net import fsspec_files
from pipeline.stage.keys import PROJECT
from tests.parts.volunteers import volunteering
from tests.parts.volunteers.stores import BUCKET, opened, without_credentials

pytestmark = pytest.mark.long

PEERS = 2
NAMES = [*(f"{peer:03}" for peer in range(PEERS)), "follower"]


def train_without_credentials(folder, monkeypatch):
    without_credentials(monkeypatch)
    rounds = volunteering.train_all(folder, NAMES)
    assert all(len(one["decision"]["applied"]) == PEERS for one in rounds)
    return rounds


def test_they_end_alike_by_addresses_that_the_lab_signed(tmp_path, monkeypatch, bucket):
    by = f"{bucket.address}/{BUCKET}/run"
    volunteering.opened(tmp_path, PEERS, store=f"s3://{BUCKET}/run", by=by)
    before = len(bucket.seen)
    rounds = train_without_credentials(tmp_path, monkeypatch)
    asked = bucket.seen[before:]
    assert all(said is None for _, _, said in asked)  # no Authorization
    puts = [path for verb, path, _ in asked if verb == "PUT"]
    assert all("X-Amz-Signature=" in path for path in puts)
    assert len(puts) >= 2 * PEERS * len(rounds)


@pytest.mark.soak
def test_they_end_alike_over_ceph_with_the_policy_of_the_page(tmp_path, monkeypatch, ceph):
    page = (PROJECT / "docs" / "how-to" / "volunteer.md").read_text()
    policy = re.search(r"```json\n(.*?)```", page, re.DOTALL)[1].replace("BUCKET/RUN", BUCKET)
    with opened("ceph", tmp_path, monkeypatch, ceph) as store:
        files = fsspec_files.find_file_system(f"s3://{BUCKET}")[0]
        files.call_s3("put_bucket_policy", Bucket=BUCKET, Policy=policy)  # all may read
        by = f"{ceph}/{store.address.removeprefix('s3://').replace(' ', '%20')}"
        volunteering.opened(tmp_path, PEERS, store=store.address, by=by)
        train_without_credentials(tmp_path, monkeypatch)
