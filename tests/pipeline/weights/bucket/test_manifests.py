"""Psyche's own manifests, folders without one, and manifests that are refused."""

import logging

import pytest

from pipeline.weights import hf
from tests.errors import check_names
from tests.pipeline.conversion import same_params, write_model
from tests.pipeline.weights.bucket.our_bucket import (
    FOLDER,
    JUNK,
    WHERE,
    cached,
    put,
    put_manifest,
    read,
    refusal,
    source_of,
)


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
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        ".hidden.safetensors",
        "x.bin",
        "model.safetensors.py",
        "x.safetensors\n",
        "",
    ],
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
        (b"[]", ["[]"]),
        (b"{}", ["metadata"]),
        (b'{"metadata": {"step": 1}, "files": []}', ["files", "[]"]),
        (b'{"metadata": {"step": -1}, "files": [{}]}', ["metadata.step", -1]),
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
