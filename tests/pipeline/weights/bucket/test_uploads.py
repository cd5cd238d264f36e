"""Uploads: whole on a bad network, or one line that says what is missing."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from pipeline.net import google, limits
from pipeline.runfile import Network
from pipeline.weights import bucket
from tests.pipeline.weights.bucket.our_bucket import FOLDER, WHERE, push
from tests.servers import misbehaviour as m
from tests.servers.bucket import Bucket, Object
from tests.servers.misbehaviour import Misbehaviour
from tests.servers.web import Answer


def test_a_large_file_goes_in_chunks(served, model, monkeypatch):
    monkeypatch.setattr(google, "CHUNK_BYTES", 2**18)
    (model / "added_tokens.json").write_bytes(large := bytes(range(256)) * 3000)
    push(model)
    assert served.live()[f"{FOLDER}/added_tokens.json"] == large
    assert len([path for method, path, _ in served.seen if method == "PUT"]) > len(served.objects)


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
    monkeypatch.setattr(bucket, "NETWORK", Network(attempts=2, stall_seconds=0.3))
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
        (m.redirected(), "too many redirects"),
    ],
)
def test_an_upload_that_never_ends_is_one_line(served, large, wrong, said):
    served.faults.append(Misbehaviour(wrong, where=UPLOADED))
    with pytest.raises(LockstepError, match=re.escape(said)) as caught:
        push(large)
    assert str(caught.value).startswith(f"{WHERE}/model.safetensors: ")


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
