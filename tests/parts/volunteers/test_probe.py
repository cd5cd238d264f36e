"""What the probe of a store refuses, on servers that keep all, and each time one thing less."""

import json
import re

import pytest

from lockstep.errors import LockstepError
from parts.volunteers.store.probe import probe
from parts.volunteers.store.schemes import open_store
from pipeline.stage.keys import PROJECT
from tests.parts.volunteers.stores import BUCKET, RUN, SOON, opened
from tests.servers import s3 as s3_server
from tests.servers.s3 import running_s3

pytestmark = pytest.mark.long


@pytest.fixture
def bucket(monkeypatch):
    with running_s3(monkeypatch) as bucket:
        yield bucket


def refusal() -> str:
    """The line with which a store is refused."""
    with pytest.raises(LockstepError) as caught:
        probe(open_store(f"s3://{BUCKET}/{RUN}", SOON))
    assert "\n" not in str(caught.value) and "X-Amz-Signature=" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "s3", pytest.param("ceph", marks=pytest.mark.soak)])
def test_a_store_that_keeps_all_passes_and_nothing_is_left(kind, tmp_path, monkeypatch, request):
    address = request.getfixturevalue("ceph") if kind == "ceph" else ""
    with opened(kind, tmp_path / "store", monkeypatch, address) as store:
        store.create("run.json", b"{}")
        probe(store)
        assert store.names("probe/") == {} and store.look("run.json", 2).content == b"{}"


def test_a_store_in_which_two_win_is_refused_and_left_clean(bucket):
    bucket.keeps = False
    assert re.search("[2-8] of 8 writers .* expected 1:", refusal())
    assert bucket.objects == {}


def test_a_store_that_checks_no_signature_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("parts.volunteers.store.probe.WRITERS", 1)  # moto may let two win
    with opened("moto", tmp_path, monkeypatch) as store, pytest.raises(LockstepError) as caught:
        probe(store)
    assert "answers 200 to a signed address with another name, expected 403" in str(caught.value)


LENIENT = {  # what a store may let by, and requests that then pass with any signature
    "a signed address with another name": lambda asked: "/another?" in asked.path,
    "a signed address without its condition": (
        lambda asked: asked.command == "PUT" and "If-None-Match" not in asked.headers
    ),
    "a signed address with another length": lambda asked: asked.headers["Content-Length"] == "10",
    "a signed address with another verb": (
        lambda asked: asked.command == "DELETE" and "if-none-match" in asked.path
    ),
    "a signed listing of other names": lambda asked: "prefix=" in asked.path,
}


@pytest.mark.parametrize("what", LENIENT)
def test_a_store_that_holds_addresses_to_less_is_refused(bucket, monkeypatch, what):
    real, passes = s3_server._Handler.wrong_signature, LENIENT[what]

    def wrong_signature(asked):
        return "" if passes(asked) else real(asked)

    monkeypatch.setattr(s3_server._Handler, "wrong_signature", wrong_signature)
    assert re.search(f"answers 20[04] to {what}, expected 403", refusal())


def test_a_store_that_puts_twice_by_one_address_is_refused(bucket, monkeypatch):
    real = bucket.put
    racing = re.compile(r".*/\d+$")
    monkeypatch.setattr(
        bucket,
        "put",
        lambda key, content, *, only_new=False: real(
            key, content, only_new=only_new and bool(racing.match(key))
        ),
    )
    assert "answers 200 to a signed address a second time, expected 412" in refusal()


def test_the_policies_of_the_page_are_json_and_deny_what_would_change_an_object():
    text = (PROJECT / "docs" / "how-to" / "volunteer.md").read_text()
    reads, shared = map(json.loads, re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    assert [one["Action"] for one in reads["Statement"]] == ["s3:GetObject"]
    denied = {one["Sid"]: one for one in shared["Statement"] if one["Effect"] == "Deny"}
    assert denied["OnlyWhatIsNew"]["Condition"] == {"Null": {"s3:if-none-match": "true"}}
    assert "s3:DeleteObject" in denied["OnlyTheLabRemoves"]["Action"]
    for sid, header, only in (
        ("OnlyWhatIsReadAtOnce", "s3:x-amz-storage-class", "STANDARD"),
        ("OnlyWhatAllCanRead", "s3:x-amz-server-side-encryption", "AES256"),
    ):  # without "Null" a put that lacks the header would be refused too
        condition = {"Null": {header: "false"}, "StringNotEquals": {header: only}}
        assert denied[sid]["Condition"] == condition
