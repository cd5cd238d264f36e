"""Data and finished stages in a bucket: what docs/how-to/scale.md says a store must guarantee."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from pipeline.net import fsspec_files
from pipeline.runfile import Runtime
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards
from tests import tiny
from tests.servers.s3 import running_store


@pytest.fixture(scope="module")
def address():
    with pytest.MonkeyPatch.context() as monkeypatch, running_store(monkeypatch) as address:
        yield address


@pytest.fixture
def bucket(address):
    """What others write to a bucket with, which is empty."""
    from s3fs import S3FileSystem  # only here: every worker imports every test

    files = S3FileSystem(skip_instance_cache=True)
    files.mkdir("ours")
    yield files
    files.invalidate_cache()
    files.rm("ours", recursive=True)


def sequences(root: Path, location: dict | str, *, stream: bool = False) -> Sequences:
    """The rows that stage download gives a run, to train on."""
    root.mkdir(exist_ok=True)
    changes = {"model__LLM__data_location": location, "download__stream": stream}
    tiny.write_run(root / "run.toml", tiny.run_document(root, **changes))
    tiny.make(root / "run.toml", root, "download")
    shards = root / "data" / "shards"
    return Sequences(shards, read_shards(shards), "train", 16, Runtime(), tiny.VOCABULARY)


S3 = {"Url": {"url": "s3://ours/tokens"}}


def test_tokens_of_a_bucket_fetched_to_a_local_disk_or_streamed_are_those_of_a_folder(
    bucket, tmp_path
):
    data = tiny.write_data(tmp_path / "tokens")
    for name, content in tiny.contents(data).items():
        bucket.pipe_file(f"ours/tokens/{name}", content)  # to be found by the next listing
    rows = np.random.default_rng(0).permutation(400)
    expected = sequences(tmp_path / "folder", {"Local": str(data)}).take(rows)
    for stream in (False, True):
        found = sequences(tmp_path / f"{stream}", S3, stream=stream)
        np.testing.assert_array_equal(found.take(rows), expected)
    assert not list((tmp_path / "True" / "data").rglob("*.ds"))


def test_the_bytes_of_a_version_are_of_that_version_or_none(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(fsspec_files, "REQUEST_BYTES", 2**12)  # of 80,000
    data = tiny.write_data(tmp_path / "tokens")
    for name, content in tiny.contents(data).items():
        bucket.pipe_file(f"ours/tokens/{name}", content)
    streamed = sequences(tmp_path / "before", S3, stream=True)
    bucket.pipe_file("ours/tokens/a.ds", bytes(80_000))  # of the same size
    with pytest.raises(LockstepError, match="as listed; run again to read it anew"):
        streamed.take(np.arange(8))
    assert not sequences(tmp_path / "after", S3, stream=True).take(np.arange(8)).any()
    bucket.rm("ours/tokens/a.ds")
    with pytest.raises(LockstepError, match="s3://ours/tokens"):
        sequences(tmp_path / "gone", {"Url": {"url": "s3://ours/tokens/a.ds"}})


@pytest.mark.soak
def test_a_stage_finished_on_one_host_goes_by_a_bucket_to_another(address, bucket, tmp_path):
    one, other = tiny.make_project(tmp_path), tmp_path / "other"
    for command in (
        ("dvc", "remote", "add", "-d", "store", "s3://ours/dvc"),
        ("dvc", "remote", "modify", "store", "endpointurl", address),
        ("dvc", "repro", "-q", "train"),
        ("dvc", "push", "-q"),
        ("git", "add", "-A"),
    ):
        tiny.run(one, *command)
    tiny.commit(one, "Trained on one host")
    subprocess.run(["git", "clone", "-q", one, other], check=True)
    said = tiny.run(other, "dvc", "repro", "--pull", "evaluate")
    assert "Running stage 'witness'" in said and "Running stage 'train'" not in said
    trained = [tiny.contents(root / "data" / "trained") for root in (one, other)]
    assert trained[0] == trained[1] and trained[0]
    assert read_json(other / "data" / "verdict" / "verdict.json")["accepted"]
