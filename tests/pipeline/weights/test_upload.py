"""An epoch's params go to a bucket, beside what is audited; a server that refuses stops nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.transcript.trees import tree_hash
from models.llama import llama
from pipeline.weights import hf, upload
from tests import tiny
from tests.pipeline.conversion import write_model
from tests.servers.bucket import running_bucket


@pytest.fixture
def init(tmp_path) -> Path:
    """What stage convert leaves."""
    write_model(tmp_path / "init" / "hf")
    (tmp_path / "init" / "hf" / "generation_config.json").write_text("{}")
    (tmp_path / "init" / "hf" / "tokenizer.json").unlink()  # which would be loaded
    return tmp_path / "init"


def push(init: Path, *places: str) -> dict:
    params = llama.init(llama.Config.from_hf(tiny.MODEL), 0)
    run = SimpleNamespace(
        llm=SimpleNamespace(max_seq_len=64),
        export=SimpleNamespace(dtype="float32"),
        config=SimpleNamespace(checkpointers=places),
    )
    outs, scratch = {"convert": init, "download": init.with_name("shards")}, init.with_name("work")
    scratch.mkdir(exist_ok=True)
    paths = SimpleNamespace(key="ab" * 32, out=outs.__getitem__, scratch=scratch)
    upload.push_epoch(run, paths, params, SimpleNamespace(step=7, epoch=2))
    assert not any(scratch.iterdir())
    return params


@pytest.mark.parametrize(("place", "prefix"), [("gs://ours", ""), ("gs://ours/a/", "a/")])
def test_params_go_to_a_folder_of_their_own(init, monkeypatch, place, prefix, tmp_path):
    with running_bucket(monkeypatch) as gcs:
        params = push(init, place)
    live = {name.removeprefix(f"{prefix}unaudited/"): data for name, data in gcs.live().items()}
    assert not [name for name in live if "/" in name]
    assert b"# Unaudited: step 7 of run abab" in live["README.md"]
    assert json.loads(live["manifest.json"])["metadata"]["epoch"] == 2
    assert json.loads(live["config.json"])["max_position_embeddings"] == 64  # as it was trained
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(live[name])
    assert tree_hash(hf.read_folder(tmp_path)[1]) == tree_hash(params)


def test_a_server_that_refuses_is_a_warning(init, monkeypatch, caplog):
    with running_bucket(monkeypatch) as gcs:
        gcs.refuse = (".*", 403)
        push(init, "gs://ours")
    (line,) = [record.getMessage() for record in caplog.records if "warning" in record.getMessage()]
    assert line.startswith("train: warning: epoch 2 is not pushed: gs://ours")
