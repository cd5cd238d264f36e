"""A manifest names generations, which stay readable when others write there."""

import logging

import pytest

from lockstep.errors import LockstepError
from tests.pipeline.conversion import same_params, write_model
from tests.pipeline.weights.bucket.our_bucket import (
    FOLDER,
    WHERE,
    push,
    put,
    read,
    refusal,
    source_of,
)


def test_a_manifest_is_read_at_its_generations_though_all_is_overwritten_since(
    tmp_path, served, model, caplog
):
    caplog.set_level(logging.WARNING)
    generation = push(model)
    later = write_model(tmp_path / "later", seed=4)
    (later / "tokenizer.json").write_text("{}")
    put(served, later)  # whose manifest has not come yet
    out = read(tmp_path / "first")
    assert same_params(out, model)
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert f"manifest.json is generation {generation} today; set generation to that" in caplog.text
    newest = push(later)
    assert same_params(read(tmp_path / "newest"), later)
    assert same_params(read(tmp_path / "pinned", generation=generation), model)
    assert source_of(tmp_path / "newest/data/init")["manifest_generation"] == newest


def test_a_bucket_that_keeps_no_versions_says_so(tmp_path, served, model):
    served.versioned = False
    push(model)
    later = write_model(tmp_path / "later", seed=4)
    served.put(f"{FOLDER}/model.safetensors", (later / "model.safetensors").read_bytes())
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}/model.safetensors: found no generation 17")
    assert "a bucket without object versioning keeps only the newest" in said


def test_a_generation_that_is_not_there_or_another_than_asked_for_is_refused(
    tmp_path, served, model
):
    generation = push(model)
    served.claims[f"{FOLDER}/manifest.json"] = {"generation": "5"}
    said = refusal(tmp_path, generation=generation)
    assert said == f"{WHERE}/manifest.json: found generation 5, expected {generation}"
    said = refusal(tmp_path, generation=5)
    assert said.startswith(f"{WHERE}/manifest.json: found no generation 5, expected it")


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_two_pushes_at_once_are_one_and_a_refusal(tmp_path, served, model, name):
    push(model)
    later = write_model(tmp_path / "later", seed=4)

    def somebody_else(uploaded: str) -> None:
        if uploaded == f"{FOLDER}/{name}":
            served.before_upload = lambda name: None
            served.put(uploaded, b"theirs")

    served.before_upload = somebody_else
    with pytest.raises(LockstepError, match="somebody else wrote there since this push began"):
        push(later)
    assert served.live()[f"{FOLDER}/{name}"] == b"theirs"
