"""What is not what it says is refused in one line: bytes, folders, places and servers."""

import pytest

from pipeline.net import google
from tests.errors import check_names
from tests.pipeline.conversion import same_params
from tests.pipeline.weights.bucket.our_bucket import (
    FOLDER,
    WHERE,
    flipped,
    push,
    put,
    read,
    refusal,
)
from tests.servers.bucket import Bucket


@pytest.mark.parametrize("stated", ["crc32c", "md5Hash"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_body_is_refused_and_fetched_again(tmp_path, served, model, name, stated):
    push(model)
    other = {"crc32c": "md5Hash", "md5Hash": "crc32c"}[stated]
    served.claims = {f"{FOLDER}/{path.name}": {other: None} for path in model.iterdir()}
    served.spoil[f"{FOLDER}/{name}"] = flipped
    said = refusal(tmp_path)
    check_names(said, f"{WHERE}/{name}", stated.removesuffix("Hash"), 2)
    served.spoil[f"{FOLDER}/{name}"] = lambda content: content + b"more"
    check_names(refusal(tmp_path), f"{WHERE}/{name}")
    served.spoil.clear()
    assert same_params(read(tmp_path), model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, served, model, name):
    (model / name).unlink()
    put(served, model)
    check_names(refusal(tmp_path), WHERE, name)


def test_bytes_that_are_stored_packed_are_refused(tmp_path, served, model):
    put(served, model)
    served.put(f"{FOLDER}/config.json", (model / "config.json").read_bytes(), encoding="gzip")
    check_names(refusal(tmp_path), f"{WHERE}/config.json", "gzip")


def test_a_bucket_that_is_not_there_is_one_line(tmp_path, served):
    check_names(refusal(tmp_path, bucket="theirs"), "gs://theirs/runs/a", 404)


@pytest.mark.parametrize(
    ("field", "value"),
    [("bucket", "gs://ours"), ("bucket", ".."), ("prefix", "../x"), ("prefix", "/x"),
     ("prefix", "a//b"), ("prefix", "a/..")],
)  # fmt: skip
def test_a_place_that_would_lead_out_of_the_cache_is_refused(tmp_path, served, field, value):
    said = refusal(tmp_path, **{field: value})
    check_names(said, f"model.LLM.checkpoint.Gcs.{field}", value)
    assert served.seen == []


def test_a_server_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    with Bucket().serving() as server:
        monkeypatch.setenv(google.EMULATOR, server.address)
    check_names(refusal(tmp_path), WHERE)
