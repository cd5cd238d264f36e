"""Packs, files and the state of an optimizer: what a torch model leaves and takes."""

import hashlib
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parts.workload.worker_host import PYTHON, Host, WorkerError

MODELS = Path(__file__).parents[1] / "workload"  # odd_models.py
# What of odd_models.Odd travels: what a gradient moves, tied ones once.
TRAVELS = [
    ("coarse.bias", [6], "bfloat16"),
    ("coarse.weight", [6, 6], "bfloat16"),
    ("embed.weight", [11, 6], "float32"),
    ("norm.bias", [6], "float32"),
    ("norm.weight", [6], "float32"),
    ("scale", [], "float32"),
    ("unused", [3], "float32"),
]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    with Host("odd_models:OddLoop", {}, tmp_path_factory.mktemp("odd"), paths=[MODELS]) as host:
        yield host


@pytest.fixture
def model_id(odd):
    return odd.ask("init_model", device="cpu")["model_id"]


@pytest.fixture
def module(monkeypatch):
    for place in PYTHON:
        monkeypatch.syspath_prepend(str(place))
    return lambda name: importlib.import_module(f"lockstep_worker.{name}")


def export(host, model_id, path):
    given = {"model_schema_hash": "s", "state_dict_filter": {}}
    path = str(path)
    host.ask("export_parameter_pack", model_id=model_id, parameter_pack_path=path, **given)
    manifest = json.loads(Path(path, "manifest.json").read_text())
    return manifest, np.fromfile(Path(path, "values.f32le"), "<f4")


def take(host, path):
    given = {"parameter_pack_path": str(path), "device": "cpu", "state_dict_filter": {}}
    return host.ask("import_parameter_pack", **given)["model_id"]


def test_the_layouts_hash_is_burn_p2ps(odd, model_id, tmp_path):
    """Keys sorted, no blanks: as its page says."""
    manifest, values = export(odd, model_id, tmp_path)
    text = ",".join(
        f'{{"dtype":"torch.{dtype}","name":"{name}","numel":{int(np.prod(shape))},'
        f'"shape":{json.dumps(shape).replace(" ", "")}}}'
        for name, shape, dtype in TRAVELS
    )
    assert manifest == {
        "format": "burn-p2p-python-flattened-parameter-pack-v1",
        "model_schema_hash": "s",
        "layout_hash": "torch-layout-" + hashlib.sha256(f"[{text}]".encode()).hexdigest(),
        "parameter_count": 124,
        "values_f32_le": "values.f32le",
        "values_sha256": hashlib.sha256(values).hexdigest(),
        "state_dict_filter": {"include_globs": [], "exclude_globs": []},
        "included_keys": [name for name, _, _ in TRAVELS],
        "excluded_float_keys": [
            "frozen.bias",
            "frozen.weight",
            "norm.running_mean",
            "norm.running_var",
        ],
        "ignored_non_float_keys": ["norm.num_batches_tracked"],
        "tied": {"head.weight": "embed.weight"},
    }
    assert len(values) == 124


def test_a_module_of_its_own_name_has_it_before_its_keys(module):
    packs = module("packs")
    linear = torch.nn.Linear(2, 1, bias=False)
    state = {"modules": {"b": linear, "a": torch.nn.Linear(1, 1)}}
    layout = packs.layout_of(state, {"exclude_globs": ["a.bias"]})
    assert [tensor["name"] for tensor in layout.tensors] == ["a.weight", "b.weight"]
    with pytest.raises(ValueError, match="names without a dot"):
        packs.layout_of({"modules": {"a.b": linear}}, None)
    with pytest.raises(TypeError, match="a state of type int"):
        packs.layout_of(3, None)


def test_frozen_tensors_travel_for_a_class_of_burn_p2p(module):
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    travels = [module("packs").layout_of(model, None, ours).count for ours in (False, True)]
    assert travels == [3, 0]


def test_a_pack_into_a_new_model_has_its_frozen_values_too(odd, model_id, tmp_path):
    """A new model begins like every other of its seed."""
    export(odd, model_id, tmp_path / "pack")
    files = []
    loaded = odd.ask("init_model", device="cpu", seed=1)["model_id"]
    for name, one in (("one", model_id), ("two", take(odd, tmp_path / "pack")), ("three", loaded)):
        if one == loaded:
            odd.ask("load_model_artifact", model_id=one, artifact_path=str(files[0]))
        files.append(tmp_path / name)
        odd.ask("materialize_model_artifact", model_id=one, artifact_path=str(files[-1]))
    assert len({file.read_bytes() for file in files}) == 1
    assert len(load_file(files[0])) > 1  # as burn_p2p names it: artifact.safetensors


def test_a_loop_with_dropout_is_the_same_again_and_frozen_values_stay(odd, tmp_path):
    spec = {"kind": "tokens", "columns": ["inputs"], "length": 5}
    (tmp_path / "rows.json").write_text(json.dumps(spec))
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.int32).reshape(4, 5) % 9)
    batch = {"shard_paths": [str(tmp_path / "a.npy")], "microshard_ids": ["a"]}
    seen = []
    for name, seed in (("one", {}), ("two", {}), ("three", {"seed": 5})):
        model_id = odd.ask("init_model", device="cpu")["model_id"]
        given = {"batches": [batch], "num_inner_steps": 2, "require_exact_steps": True, **seed}
        given |= {"model_schema_hash": "s", "state_dict_filter": {}, "model_id": model_id}
        path = tmp_path / name
        odd.ask("run_inner_loop", **given, output_parameter_pack_path=str(path))
        manifest = json.loads((path / "manifest.json").read_text())
        seen.append(np.fromfile(path / "values.f32le", "<f4"))
        assert hashlib.sha256(seen[-1]).hexdigest() == manifest["values_sha256"]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    window = odd.ask("train_window", model_id=model_id, batches=[batch])
    assert 0 < window["metrics"]["loss"] < 20


def test_a_loop_without_rows_is_refused(odd, model_id, tmp_path):
    given = {"batches": [{"kind": "micro_epoch"}], "num_inner_steps": 2, "model_id": model_id}
    given |= {"output_parameter_pack_path": str(tmp_path / "out")}
    with pytest.raises(WorkerError, match="no shard_paths in 1 batches"):
        odd.ask("run_inner_loop", **given)


# ------------------------------------------------------------------ the state of an optimizer


def test_a_state_comes_back_as_it_was(module):
    blob = module("state_blob")
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1]}],
        "kinds": [torch.bfloat16, torch.complex64],
        "half": torch.randn(3, dtype=torch.bfloat16),
        "bits": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
    }
    data = blob.encoded(state)
    again = blob.decoded(data)
    assert blob.encoded(again) == data == blob.encoded(state)
    assert again["param_groups"] == state["param_groups"] and again["kinds"] == state["kinds"]
    assert list(again["state"]) == [0, 1]
    for name in ("half", "bits", "empty"):
        assert torch.equal(again[name], state[name]) and again[name].dtype == state[name].dtype


def test_a_damaged_state_is_refused(module):
    blob = module("state_blob")
    data = blob.encoded({"a": torch.ones(4)})
    for wrong in (b"", data[:-1], data + b"0", b"x" + data, data[:30]):
        with pytest.raises(ValueError, match="state of an optimizer: "):
            blob.decoded(wrong)
    with pytest.raises(ValueError, match="dtype 'Tensor'; one of torch's"):
        blob.decoded(data.replace(b'"float32"', b'"Tensor" '))
    with pytest.raises(TypeError, match="state of an optimizer: object; numbers"):
        blob.encoded({"a": object()})
