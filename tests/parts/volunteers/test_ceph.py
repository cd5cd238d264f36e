"""Ceph's gateway: it passes the probe, and holds a volunteer to what the lab signed."""

import re
import time

import pytest

from lockstep.errors import LockstepError
from parts.volunteers import keys, layout
from parts.volunteers.lab.signing import sign_ahead
from parts.volunteers.store.addresses import open_addressed
from parts.volunteers.store.probe import probe
from parts.volunteers.store.web_store import StoreRequest
from pipeline.net import fsspec_files
from pipeline.stage.keys import PROJECT
from tests.parts.volunteers.stores import BUCKET, SOON, opened, reader

pytestmark = pytest.mark.soak
LAB, KEY = keys.PrivateKey.generate(), keys.PrivateKey.generate()
READER = reader(KEY, payload_bytes=100_000)
NAME, LENGTH = layout.of_peer(70, 7, "record"), layout.RECORD_BYTES
PAGE = PROJECT / "docs" / "how-to" / "volunteer.md"


def let_all_read() -> None:
    """Puts the policy of the page on the bucket."""
    files = fsspec_files.find_file_system(f"s3://{BUCKET}")[0]
    policy = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    policy = policy.replace("BUCKET/RUN", BUCKET)
    files.call_s3("put_bucket_policy", Bucket=BUCKET, Policy=policy)


@pytest.fixture
def lab(ceph, tmp_path, monkeypatch):
    with opened("ceph", tmp_path, monkeypatch, ceph) as store:
        yield store


def test_it_passes_the_probe_and_nothing_is_left(lab):
    probe(lab)
    assert lab.names("probe/") == {}


def test_a_volunteer_without_credentials_does_what_was_signed_alone(lab, ceph, monkeypatch):
    let_all_read()
    sign_ahead(lab, [READER], range(64, 80), 60, LAB)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID"), monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    run = lab.address.removeprefix("s3://").replace(" ", "%20")
    mine = open_addressed(f"{ceph}/{run}", READER, KEY, LAB.public_key(), SOON)
    payload = layout.of_peer(70, 7, "payload")
    assert mine.look(payload, 10) is None  # which this store hides
    assert mine.create(payload, b"p" * 100_000) and mine.create(NAME, b"x" * LENGTH)
    assert not mine.create(NAME, b"y" * LENGTH) and mine.create(NAME, b"x" * LENGTH)
    seen = mine.look(NAME, LENGTH)
    assert seen.content == b"x" * LENGTH and abs(seen.seconds - time.time()) < 60
    assert mine.names(layout.round_folder(70))[NAME] == seen.seconds  # both in whole seconds
    endpoint = mine.endpoint
    url, listing = (
        endpoint.find(ask)
        for ask in (
            StoreRequest("PUT", NAME, LENGTH),
            StoreRequest("LIST", layout.round_folder(70)),
        )
    )
    other = layout.of_peer(70, 8, "record")
    endpoint.give(endpoint.folder, {StoreRequest("PUT", NAME, 3): url})
    endpoint.give(
        endpoint.folder, {StoreRequest("PUT", other, LENGTH): url.replace("007.", "008.")}
    )
    endpoint.give(
        endpoint.folder, {StoreRequest("LIST", "rounds/00000071/"): listing.replace("070", "071")}
    )
    for refused in (
        lambda: mine.create(NAME, b"abc"),
        lambda: mine.create(other, b"x" * LENGTH),
        lambda: mine.names("rounds/00000071/"),
    ):
        with pytest.raises(LockstepError, match="answered 403"):
            refused()
    assert lab.look(other, 10) is None and lab.look(NAME, LENGTH).content == b"x" * LENGTH
