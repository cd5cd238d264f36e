"""What a later stage would miss is a row that fails before any of it runs."""

import json
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest

from lockstep.files import write_json
from models.llama import llama
from pipeline import runfile
from pipeline.preflight import commands, plan, preflight
from pipeline.preflight.row import CheckRow, Mark
from pipeline.stage import logs
from pipeline.stage.keys import PROJECT, STAGES
from tests import tiny
from tests.errors import check_names, refused
from tests.pipeline.language_model.test_cudnn import FUSED
from tests.pipeline.preflight.looks import check_lacking, looks, said, written
from tests.servers import hub as hub_server
from tests.servers.hub import REPO

RUN = PROJECT / "params" / "run.toml"
DRAND = f"drand quicknet 1 {'0' * 96}"
SHUFFLE = {"shuffle": "DontShuffle", "held_out_percent": 1.0}
CONFIG = llama.Config.from_hf(tiny.MODEL).to_hf()


def test_the_default_run_passes_every_look_and_no_network_is_asked(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    rows = looks(RUN, tmp_path)
    assert {row.mark for row in rows} == {Mark.FINE}
    assert [row.name for row in rows] == ["run file", "model", "data", "disk"]


@pytest.mark.parametrize(
    ("key", "module", "changes"),
    [
        ("[runtime] sinks", "wandb", {"runtime__sinks": ["wandb"]}),
        ("[runtime] sinks", "tensorboardX", {"runtime__sinks": ["tensorboard"]}),
        ("[witness] beacon", "py_ecc", {"witness__beacon": DRAND}),
        (
            "model.LLM.data_location",
            "pyarrow",
            {"model__LLM__data_location": {"Preprocessed": "/nowhere"}},
        ),
        (
            "model.LLM.data_location",
            "s3fs",
            {"model__LLM__data_location": {"Url": {"url": "s3://a/b"}}},
        ),
        (
            "model.LLM.data_location",
            "s3fs",
            {"model__LLM__data_location": {
                "Text": {"source": "s3://a/b", "vocab_size": 300, **SHUFFLE}}},
        ),
        (
            "[config] checkpointers",
            "google.auth",
            {"export__every_epoch": True, "config__checkpointers": ["gs://a/b"]},
        ),
    ],
)  # fmt: skip
def test_a_package_that_a_stage_would_lack_is_a_row_that_fails(
    key, module, changes, tmp_path, monkeypatch
):
    if key == "[config] checkpointers":
        changes = older_spelling() | changes
    check_lacking(monkeypatch, tmp_path, key, module, **changes)


def older_spelling() -> dict[str, object]:
    """Changes to the spelling that has checkpointers."""
    config = runfile.load(PROJECT / "params" / "fineweb-edu.toml").config
    return {"config": config.model_dump(mode="json") | {"global_batch_size": 4}}


# ---- Models, tokenizers and data on the hub ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.running_hub(monkeypatch, tmp_path / "hf") as running:
        yield running


def model_of(*names: str, index: dict | None = None) -> dict[str, bytes]:
    """The files of a repository."""
    files = dict.fromkeys(names, b"{}") | {"config.json": json.dumps(CONFIG).encode()}
    return files | ({"model.safetensors.index.json": json.dumps(index).encode()} if index else {})


SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
TEXT = {"Text": {"source": "text", "tokenizer": REPO, **SHUFFLE}}
NEW = {"Text": TEXT["Text"] | {"most_seen_percent": 0.25}}


@pytest.mark.parametrize(
    ("files", "failing"),
    [
        (model_of("model.safetensors", "tokenizer.json"), {}),
        (model_of("model-1.safetensors", "model-2.safetensors", "vocab.json", index=SHARDS), {}),
        (model_of("tokenizer.json"), {"model": "model.safetensors"}),
        (model_of("model-1.safetensors", "vocab.txt", index=SHARDS),
         {"model": "model-2.safetensors"}),
        (model_of("model.safetensors"), {"tokenizer": "tokenizer.json"}),
        ({"model.safetensors": b"", "tokenizer.json": b""}, {"model": "config.json"}),
        ({}, {"model": REPO, "tokenizer": REPO}),
    ],
    ids=["whole", "sharded", "no weights", "a shard less", "no tokenizer", "no config", "none"],
)  # fmt: skip
def test_what_a_repository_lacks_is_a_row_that_fails(files, failing, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a text\n" * 5000)
    if files:
        hub.commit(files)
    changes = {"model__LLM__checkpoint": {"Hub": {"repo_id": REPO}}}
    rows = looks(written(tmp_path, model__LLM__data_location=TEXT, **changes), tmp_path)
    found = said(rows, Mark.FAILS)
    assert found.keys() == failing.keys()
    for name, word in failing.items():
        assert word in found[name]
    # of weights, which may be large, none is fetched
    assert not [path for path in (tmp_path / "data").rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", None),
        ("model_type", "gpt9"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 3),
        ("hidden_act", "foo"),
        ("rope_scaling", {"type": "yarn"}),
        ("vocab_size", 10**15),
        ("no_such_key", 1),
    ],
)
@pytest.mark.parametrize("place", ["Init", "Hub"])
def test_a_model_that_one_row_refuses_is_read_by_no_other(place, key, value, tmp_path):
    config = {name: one for name, one in (tiny.MODEL | {key: value}).items() if one is not None}
    checkpoint = {"Init": {"seed": 0, "config": config}}
    if key == "no_such_key" and place == "Hub":
        pytest.skip("a config of the hub has keys for others")
    if place == "Hub":
        write_json(tmp_path / "model" / "config.json", config)
        (tmp_path / "model" / "model.safetensors").touch()
        checkpoint = {"Hub": {"repo_id": str(tmp_path / "model")}}
    changes = {"model__LLM__architecture": "HfAuto", "model__LLM__checkpoint": checkpoint}
    run_file = written(tmp_path, **changes)
    rows = looks(run_file, tmp_path)
    assert said(rows, Mark.FAILS).keys() == {"model"}
    check_names(said(rows, Mark.FAILS)["model"], key)
    assert "disk" in said(rows, Mark.UNKNOWN)
    with refused(key):
        plan.plan(runfile.load(run_file), tmp_path, converted=False)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("rate", {"model__LLM__lr_schedule__Cosine__base_lr": 2.0}, ("base_lr", "2")),
        ("rate", {"model__LLM__lr_schedule__Cosine__base_lr": 0.0}, ("base_lr", "0")),
        ("percent", {"model__LLM__data_location": NEW}, ("Text.most_seen_percent", "0.25", "25")),
        ("percent", {"witness__replay_percent": 0.25}, ("replay_percent", "0.25", "25")),
        ("batch", {"peers__passes": 10**6, "config__global_batch_size_end": 60000},
         ("60,000",)),
        ("audit", {"peers__layout": "vmap"}, ("layout", "vmap", "each", "everywhere")),
    ],
)  # fmt: skip
def test_a_value_that_hardly_anybody_means_is_a_row_that_warns(name, changes, named, tmp_path):
    rows = looks(written(tmp_path, **changes), tmp_path)
    check_names(said(rows, Mark.WARNING)[name], *named)


def test_the_row_of_data_says_what_is_there_and_what_the_run_takes(tmp_path):
    rows = looks(written(tmp_path), tmp_path)
    check_names(said(rows, Mark.FINE)["data"], "the run takes 24: ", "sequences to train on, ")
    assert "24 sequences" not in said(rows, Mark.FINE)["data"]


def test_a_terminal_of_80_columns_breaks_between_words_and_no_line_is_longer(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_file = written(tmp_path, model__LLM__lr_schedule__Cosine__base_lr=2.0)
    commands.show(run_file, tmp_path)
    for line in plan.plan(runfile.load(run_file), tmp_path, converted=False).lines():
        logs.say(line)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    # a path has no place to break it
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


def test_a_dataset_that_is_not_there_is_a_row_that_fails(hub, tmp_path):
    changes = {"model__LLM__data_location": {"Hub": {"repo_id": "ours/text"}}}
    assert "ours/text" in said(looks(written(tmp_path, **changes), tmp_path), Mark.FAILS)["data"]


def test_a_hub_that_cannot_be_reached_is_said_and_fails_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    changes = {"model__LLM__data_location": {"Hub": {"repo_id": "ours/text"}}}
    rows = looks(
        written(tmp_path, model__LLM__checkpoint={"Hub": {"repo_id": REPO}}, **changes), tmp_path
    )
    assert said(rows, Mark.UNKNOWN).keys() == {"model", "data", "disk"}
    assert not said(rows, Mark.FAILS)


# ---- Data, disk, memory, devices ----


def test_too_few_tokens_are_a_row_that_fails(tmp_path):
    failing = said(looks(written(tmp_path, config__total_steps=10**6), tmp_path), Mark.FAILS)
    check_names(
        failing["data"], "3,997,500", "2,500", "config.total_steps", "[peers] passes = 1600"
    )


def test_too_little_disk_is_a_row_that_fails_and_what_is_begun_counts(monkeypatch, tmp_path):
    run_file = written(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "snapshot_every" in said(looks(run_file, tmp_path), Mark.FAILS)["disk"]
    begun = preflight.Paths("train", run_file, tmp_path).scratch / "checkpoints" / "state"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"-" * 10**7)
    assert "disk" in said(looks(run_file, tmp_path), Mark.FINE)


def test_what_the_machine_lacks_is_said(tmp_path):
    rows = looks(written(tmp_path, **FUSED), tmp_path)
    assert "NVIDIA GPU" in said(rows, Mark.FAILS)["GPU"]
    rows = looks(written(tmp_path, runtime__memory_gb=3e-5), tmp_path)
    assert "fewer peers" in said(rows, Mark.WARNING)["memory"]


# ---- The command ----


def test_what_has_its_result_is_not_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.artifacts, "rerun_reasons", lambda *_: dict.fromkeys(STAGES))
    run_file = written(tmp_path, model__LLM__checkpoint={"Hub": {"repo_id": "nobody/nothing"}})
    assert [row.name for row in looks(run_file, tmp_path)] == ["run file", "results"]


def test_a_run_that_would_fail_is_status_1_and_each_reason_a_line(tmp_path, capsys):
    write_json(tmp_path / "m" / "config.json", CONFIG)
    checkpoint = {"Hub": {"repo_id": str(tmp_path / "m")}}
    run_file = written(tmp_path, model__LLM__checkpoint=checkpoint, config__total_steps=10**6)
    with refused(run_file, 2):
        commands.check(run_file, tmp_path)
    marks = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert marks.count("✗") == 2
    commands.check(written(tmp_path), tmp_path)


def test_a_table_has_words_where_there_are_no_ticks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="ascii"))
    line = CheckRow(Mark.FAILS, "data", "too few").line()
    assert line.split() == ["FAILS", "data", "too", "few"]
