"""What a stage reads of a bucket: by manifests, ours and Psyche's, and what is refused."""

import logging

import pytest

from lockstep.errors import LockstepError
from pipeline.net import web
from pipeline.weights import hf
from tests.errors import check_names
from tests.pipeline.conversion import rename_shards, same_params, write_model
from tests.pipeline.weights.bucket.our_bucket import (
    FOLDER,
    JUNK,
    NAME,
    WHERE,
    cached,
    flipped,
    push,
    put,
    put_manifest,
    read,
    refusal,
    source_of,
)
from tests.servers import misbehaviour
from tests.servers.misbehaviour import Misbehaviour

pytestmark = pytest.mark.long

# ---- Generations, which stay readable when others write there ----


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


# ---- Psyche's own manifests, folders without one, and manifests that are refused ----


def test_shards_without_an_index_are_read_as_a_manifest_lists_them(tmp_path, served):
    model = write_model(tmp_path / "model", max_shard_bytes=3000)
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(shards) > 2
    put(served, model)
    served.put(f"{FOLDER}/{hf.INDEX}", b'{"weight_map": {"of": "others.safetensors"}}')
    put_manifest(served, *shards)
    out = read(tmp_path)
    assert same_params(out, model)
    assert hf.INDEX not in source_of(out)["generations"]
    assert set(source_of(out)["generations"]) >= {*shards, "config.json", "tokenizer.json"}


def test_one_file_of_another_name_is_read_too(tmp_path, served, model):
    put(served, model)
    served.put(f"{FOLDER}/weights-7.safetensors", (model / hf.WEIGHTS).read_bytes())
    put_manifest(served, "weights-7.safetensors")
    assert same_params(read(tmp_path), model)


@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 3000])
@pytest.mark.parametrize("index", [True, False])
def test_without_a_manifest_what_lies_there_is_read(tmp_path, served, caplog, shard_bytes, index):
    caplog.set_level(logging.WARNING)
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    put(served, model)
    if not index:
        served.objects.pop(f"{FOLDER}/{hf.INDEX}", None)
    served.put(f"{FOLDER}/sub/model.safetensors", b"of another folder")
    out = read(tmp_path)
    assert same_params(out, model)
    assert source_of(out)["manifest_generation"] is None
    assert f"{WHERE} has no manifest.json: its files as of today are read" in caplog.text
    assert all(name.startswith("no_manifest/") for name in cached(tmp_path))
    assert not {f"no_manifest/{name}" for name in JUNK} & cached(tmp_path).keys()


def test_without_a_manifest_shards_have_the_names_that_their_index_says(tmp_path, served):
    model = write_model(tmp_path / "model", max_shard_bytes=3000)
    rename_shards(model)
    put(served, model)
    assert same_params(read(tmp_path), model)


def test_without_a_manifest_what_changed_is_fetched_and_what_went_is_not_kept(
    tmp_path, served, model
):
    put(served, write_model(tmp_path / "shards", max_shard_bytes=3000))
    read(tmp_path)
    for path in (tmp_path / "shards").glob("model*"):
        del served.objects[f"{FOLDER}/{path.name}"]
    put(served, model)
    assert same_params(read(tmp_path), model)
    weights = {name for name in cached(tmp_path) if "model" in name}
    assert weights == {"no_manifest/model.safetensors"}


@pytest.mark.parametrize(
    ("names", "changes", "named"),
    [
        (["model.safetensors"], {"size_bytes": 12}, ["model.safetensors", 12]),
        (["model.safetensors"], {"filename": "b.safetensors"}, ["b.safetensors"]),
        (["model.safetensors"] * 2, {}, ["model.safetensors"]),
        (["model.safetensors", "a.safetensors"], {}, ["model.safetensors"]),
    ],
)
def test_a_manifest_of_other_files_than_are_there_is_refused(
    tmp_path, served, model, names, changes, named
):
    put(served, model)
    served.put(f"{FOLDER}/a.safetensors", (model / hf.WEIGHTS).read_bytes())
    put_manifest(served, *names, **changes)
    check_names(refusal(tmp_path), *named)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "sub/x.safetensors", ".x.safetensors", "x.safetensors\n", "x.bin"]
)
def test_a_name_that_leaves_the_folder_or_is_no_safetensors_is_refused(
    tmp_path, served, model, name
):
    put(served, model)
    put_manifest(served, "model.safetensors", filename=name)
    check_names(refusal(tmp_path), f"{WHERE}/manifest.json", "files[0].filename", repr(name))
    assert not [path for path in tmp_path.rglob("*.safetensors") if "model" not in path.parts]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", ["JSON"]),
        (b"{}", ["metadata"]),
        (b'{"metadata": {"step": 1}, "files": []}', ["files", "[]"]),
        (
            b'{"metadata": {"step": 1}, "files": [{"filename": "a.safetensors", "generation": 0, '
            b'"size_bytes": 1}]}',
            ["files[0].generation", 0],
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, served, model, content, named):
    put(served, model)
    served.put(f"{FOLDER}/manifest.json", content)
    check_names(refusal(tmp_path), f"{WHERE}/manifest.json", *named)


# ---- What is not what it says ----


@pytest.mark.parametrize("stated", ["crc32c", "md5Hash"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_body_is_refused_and_fetched_again(tmp_path, served, model, name, stated):
    push(model)
    other = {"crc32c": "md5Hash", "md5Hash": "crc32c"}[stated]
    served.claims = {f"{FOLDER}/{path.name}": {other: None} for path in model.iterdir()}
    served.faults.append(Misbehaviour(misbehaviour.flipped, where=f"^GET /download.*{name}"))
    said = refusal(tmp_path)
    check_names(said, f"{WHERE}/{name}", stated.removesuffix("Hash"), 2)
    served.faults[0].spoil = misbehaviour.longer
    check_names(refusal(tmp_path), f"{WHERE}/{name}")
    served.faults.clear()
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


# ---- The cache: what is there is not fetched again, unless it was damaged ----


def test_what_is_there_is_not_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    before = dict(served.sent)
    read(tmp_path, generation=generation)
    assert served.sent == before


def test_offline_what_was_read_before_is_read_again(tmp_path, served, model, monkeypatch):
    push(model)
    read(tmp_path)
    monkeypatch.setenv(web.OFFLINE, "1")
    before = list(served.seen)
    assert same_params(read(tmp_path), model)
    assert served.seen == before
    assert "HF_HUB_OFFLINE is set" in refusal(tmp_path / "other", generation=5)


def test_a_cached_file_that_was_damaged_is_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    file = tmp_path / f"data/store/gcs/{NAME}/{FOLDER}/step-7-{generation}/model.safetensors"
    file.write_bytes(flipped(file.read_bytes()))
    assert same_params(read(tmp_path), model)
    assert file.read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_link_in_the_cache_is_replaced_and_not_written_through(tmp_path, served, model):
    push(model)
    read(tmp_path)
    (file,) = (tmp_path / "data" / "store").rglob("model.safetensors")
    ours = file.rename(tmp_path / "ours.safetensors")
    before = ours.read_bytes()
    file.symlink_to(ours)
    assert same_params(read(tmp_path), model)
    assert not file.is_symlink() and ours.read_bytes() == before
