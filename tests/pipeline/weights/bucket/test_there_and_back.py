"""What is pushed comes back with the same bytes, and a manifest says what was pushed."""

import json
import logging

import pytest

from lockstep.files import sha256_file
from tests import tiny
from tests.pipeline.conversion import same_params, write_model
from tests.pipeline.weights.bucket.our_bucket import FOLDER, JUNK, NAME, push, read, source_of


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
