"""What is pushed comes back with the same bytes, though the network is bad."""

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from pipeline.net import google, limits
from pipeline.runfile import Network
from pipeline.weights import bucket
from tests import tiny
from tests.errors import refused
from tests.pipeline.conversion import check_silence, same_params, write_model
from tests.pipeline.weights.bucket.our_bucket import (
    FOLDER,
    JUNK,
    NAME,
    WHERE,
    push,
    put,
    read,
    refusal,
    source_of,
)
from tests.servers import misbehaviour as m
from tests.servers.bucket import Bucket, Object
from tests.servers.misbehaviour import Misbehaviour
from tests.servers.web import Answer

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("prefix", "shard_bytes"), [("", 5 * 2**30), ("runs/a", 3000), ("runs/a/", 5 * 2**30)]
)
def test_what_is_pushed_comes_back_with_the_same_bytes(
    tmp_path, served, caplog, prefix, shard_bytes
):
    caplog.set_level(logging.WARNING)
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    served.put("runs/ab/model.safetensors", b"of another folder")
    generation = push(model, prefix)
    kind = "P2PGcs" if prefix == "runs/a" else "Gcs"
    out = read(tmp_path, kind, prefix=prefix, generation=generation)
    assert same_params(out, model)
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    source = source_of(out)
    wanted = {p.name: p.read_bytes() for p in model.iterdir() if p.name not in JUNK}
    assert source["files"] == {name: sha256_file(model / name) for name in wanted}
    assert source["manifest_generation"] == generation
    folder = f"{prefix.rstrip('/')}/" if prefix else ""
    assert source["generations"] == {
        name: served.find(f"{folder}{name}", None).generation for name in wanted
    }
    cache = tmp_path / "data" / "store" / "gcs" / NAME / folder / f"step-7-{generation}"
    assert tiny.contents(cache) == wanted
    assert caplog.text == ""


def test_a_manifest_says_in_psyches_words_what_was_pushed(served, model):
    push(model)
    said = json.loads(served.live()[f"{FOLDER}/manifest.json"])
    assert said["metadata"].keys() >= {"timestamp", "epoch", "step", "run_id"}
    assert (said["metadata"]["step"], said["metadata"]["epoch"]) == (7, 2)
    assert said["metadata"]["run_id"] == "0123456789ab"
    weights = served.find(f"{FOLDER}/model.safetensors", None)
    assert said["files"] == [
        {
            "filename": "model.safetensors",
            "generation": weights.generation,
            "size_bytes": len(weights.content),
        }
    ]
    beside = {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert {entry["filename"] for entry in said["companions"]} == beside


def test_weights_are_sent_first_and_the_manifest_last(served, model):
    order = []
    served.before_upload = lambda name: order.append(name.removeprefix(f"{FOLDER}/"))
    push(model)
    assert (order[0], order[-1]) == ("model.safetensors", "manifest.json")
    assert len(order) == len(served.objects)


def test_the_same_export_is_not_sent_twice(tmp_path, served, model):
    first = push(model)
    second = push(model)
    assert second > first
    assert {name: len(versions) for name, versions in served.objects.items()} == {
        f"{FOLDER}/{path.name}": 1 for path in model.iterdir()
    } | {f"{FOLDER}/manifest.json": 2}
    assert same_params(read(tmp_path, generation=second), model)


# ---- Uploads: whole on a bad network, or one line that says what is missing ----


def other_range(said: str | None) -> Callable[[Answer], Answer]:
    """Says of an upload that other bytes have arrived than have."""

    def spoil(answer: Answer) -> Answer:
        headers = {name: text for name, text in answer.headers.items() if name != "Range"}
        return replace(answer, status=308, headers=headers | ({"Range": said} if said else {}))

    return spoil


UPLOADED = "^PUT /upload"
LARGE = bytes(range(256)) * 3000  # three chunks of 256 KiB


@pytest.fixture
def large(served, tmp_path, monkeypatch) -> Path:
    """A folder of one large file, pushed in small chunks, and no waits between attempts."""
    monkeypatch.setattr(google, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr(bucket, "PUSH_NETWORK", Network(attempts=2, stall_seconds=0.3))
    monkeypatch.setattr(limits, "pause", lambda seconds, cancelled: None)
    (folder := tmp_path / "large").mkdir()
    (folder / "model.safetensors").write_bytes(LARGE)
    return folder


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("wrong", [m.refused, m.silent, m.not_http, m.status(503), m.always_100])
def test_an_upload_goes_on_where_it_stopped(served, large, wrong, after):
    served.faults.append(Misbehaviour(wrong, times=1, where=UPLOADED, after=after))
    push(large)
    assert served.live()[f"{FOLDER}/model.safetensors"] == LARGE
    assert len(served.objects[f"{FOLDER}/model.safetensors"]) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (m.silent, "timed out, expected 768000 more bytes to arrive within 2 attempts"),
        (m.trickling, "more bytes to arrive within 2 attempts"),
        (m.status(503), "answered 503 Service Unavailable, expected 768000 more bytes"),
        (other_range(None), "the server takes no more bytes, expected 768000 more bytes"),
        (other_range("bytes=0-767999"), "expected some from offset 0 on"),
        (other_range("bytes=0-999999"), "expected some from offset 0 on"),
        (other_range("all"), "has 'all' of an upload of 768000 bytes"),
        (m.status(410), "answered 410 Gone, expected a bucket that the credentials of"),
        (m.redirected(), "redirects PUT, expected an answer"),
    ],
)
def test_an_upload_that_never_ends_is_one_line(served, large, wrong, said):
    served.faults.append(Misbehaviour(wrong, where=UPLOADED))
    with refused(said, f"{WHERE}/model.safetensors:"):
        push(large)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        ({"size": "7"}, "has 7 bytes of crc32c:"),
        ({"crc32c": "AAAAAA=="}, "of crc32c:00000000, expected 768000 of crc32c:"),
        ({"generation": "new"}, "invalid answer: generation is"),
    ],
)
def test_what_the_server_has_is_what_was_sent(served, large, claimed, said):
    def spoil(answer: Answer) -> Answer:
        body = json.dumps(json.loads(answer.body) | claimed).encode()
        return replace(answer, body=body, headers={"Content-Length": str(len(body))})

    served.faults.append(Misbehaviour(spoil, where=UPLOADED, after=2))
    with pytest.raises(LockstepError, match=re.escape(said)):
        push(large)


def test_an_upload_begins_at_an_address_and_another_server_sees_no_credentials(
    served, large, account
):
    for address in ("", "file:///etc/passwd"):
        elsewhere = partial(replace, headers={"Location": address, "Content-Length": "2"})
        served.faults[:] = [Misbehaviour(elsewhere, where="^POST /upload")]
        with pytest.raises(LockstepError, match="sends no address, expected one of an upload"):
            push(large)
    with Bucket().serving() as other:
        about = {"name": "x", "crc32c": Object("x", 0, LARGE).resource()["crc32c"]}
        other.uploads["0"] = {"about": about, "query": {}, "content": b""}
        address = f"{other.address}/upload/0?upload_id=0"
        elsewhere = partial(replace, headers={"Location": address, "Content-Length": "2"})
        served.faults[:] = [Misbehaviour(elsewhere, times=1, where="^POST /upload")]
        push(large)
        assert other.live() == {"x": LARGE}
        assert {said for _, _, said in other.seen} == {None}


# ---- Credentials reach the server that they are for, and nothing else ----


def test_without_credentials_nobody_asks_and_an_emulator_sees_no_login(
    tmp_path, served, model, monkeypatch
):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    push(model)
    read(tmp_path)
    login = tmp_path / "gcloud" / "application_default_credentials.json"
    login.parent.mkdir()
    said = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
    said |= {"refresh_token": "r", "token_uri": f"{served.address}/token"}
    login.write_text(json.dumps(said))
    push(model)
    assert {said for _, _, said in served.seen} == {None}


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("what", ["GET", "POST /upload", "download"])
def test_the_token_reaches_the_server_and_nothing_else(
    tmp_path, served, model, account, capfd, caplog, status, what
):
    caplog.set_level(logging.DEBUG)
    asked = f"Bearer {served.token}"
    if what == "download":
        push(model)
    served.refuse = (what, status)
    if what == "download":
        said = refusal(tmp_path)
    else:
        with pytest.raises(LockstepError) as caught:
            push(model)
        said = str(caught.value)
    assert asked in {said for _, _, said in served.seen}
    assert said.startswith(WHERE)
    assert (f"answered {status}" if what == "download" else "we do not like") in said or (
        status == 500 and what != "download"
    )
    check_silence(served.token, tmp_path, said, capfd, caplog)
    served.refuse = None
    push(model)
    read(tmp_path)
    check_silence(served.token, tmp_path, "", capfd, caplog)


def test_credentials_that_are_none_are_one_line(tmp_path, served, model, monkeypatch):
    monkeypatch.setenv(google.KEY_VARIABLE, str(tmp_path / "none.json"))
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}: {google.KEY_VARIABLE}: ")
    assert said.endswith("expected a file of credentials")


def test_without_google_auth_a_public_bucket_is_read_and_a_push_is_one_line(
    tmp_path, served, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    put(served, model)
    assert same_params(read(tmp_path), model)
    with pytest.raises(LockstepError, match=r"is not installed.*\[gcs\]"):
        push(model)
