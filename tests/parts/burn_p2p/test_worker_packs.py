"""Packs, files and the state of an optimizer: what a torch model leaves and takes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.errors import refused
from tests.parts.workload.worker_host import Host, inner_job, left_by

MODELS = Path(__file__).parents[1] / "workload"  # odd_models.py
TOKENS = {"kind": "tokens", "columns": ["inputs"], "length": 5}


@pytest.fixture(scope="module")
def odd(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("odd")
    with Host("odd_models:OddLoop", {}, folder, [MODELS], python) as host:
        yield host


@pytest.fixture
def model_id(odd):
    return odd.ask("init_model", device="cpu")["model_id"]


def export(host, model_id, path):
    given = {"model_id": model_id, "parameter_pack_path": str(path), "state_dict_filter": {}}
    host.ask("export_parameter_pack", **given, model_schema_hash="s")
    return json.loads((path / "manifest.json").read_text())


def test_a_gradients_tensors_travel_and_tied_ones_once(odd, model_id, tmp_path):
    manifest = export(odd, model_id, tmp_path)
    assert manifest["parameter_count"] == 124
    assert manifest["included_keys"] == [
        "coarse.bias", "coarse.weight", "embed.weight", "norm.bias", "norm.weight", "scale",
        "unused",
    ]  # fmt: skip
    assert manifest["excluded_float_keys"] == [
        "frozen.bias", "frozen.weight", "norm.running_mean", "norm.running_var",
    ]  # fmt: skip
    assert manifest["ignored_non_float_keys"] == ["norm.num_batches_tracked"]
    assert manifest["tied"] == {"head.weight": "embed.weight"}
    assert manifest["state_dict_filter"] == {"include_globs": [], "exclude_globs": []}


def test_frozen_tensors_travel_for_a_class_of_burn_p2p(packs):
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    travels = [packs.layout_of(model, None, ours).count for ours in (False, True)]
    assert travels == [3, 0]


def test_a_pack_into_a_new_model_has_its_frozen_values_too(odd, model_id, tmp_path):
    """A new model begins like every other of its seed."""
    export(odd, model_id, tmp_path / "pack")
    files = []
    loaded = odd.ask("init_model", device="cpu", seed=1)["model_id"]
    given = {"parameter_pack_path": str(tmp_path / "pack"), "state_dict_filter": {}}
    taken = odd.ask("import_parameter_pack", **given, device="cpu")["model_id"]
    for name, one in (("one", model_id), ("two", taken), ("three", loaded)):
        if one == loaded:
            odd.ask("load_model_artifact", model_id=one, artifact_path=str(files[0]))
        files.append(tmp_path / name)
        odd.ask("materialize_model_artifact", model_id=one, artifact_path=str(files[-1]))
    assert len({file.read_bytes() for file in files}) == 1
    assert len(load_file(files[0])) > 1  # as burn_p2p names it: artifact.safetensors


def test_a_loop_with_dropout_is_the_same_again_and_frozen_values_stay(odd, tmp_path):
    rows, seen = np.arange(20, dtype=np.int32).reshape(4, 5) % 9, []
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        model_id = odd.ask("init_model", device="cpu")["model_id"]
        given = inner_job(tmp_path / name, [rows], TOKENS, steps=2, seed=seed)
        odd.ask("run_inner_loop", **given, model_id=model_id)
        manifest = json.loads((tmp_path / name / "out" / "manifest.json").read_text())
        seen.append(left_by(given))
        assert hashlib.sha256(seen[-1]).hexdigest() == manifest["values_sha256"]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    window = odd.ask("train_window", model_id=model_id, batches=given["batches"])
    assert 0 < window["metrics"]["loss"] < 20


def test_a_loop_without_rows_is_refused(odd, model_id, tmp_path):
    given = {"batches": [{"kind": "micro_epoch"}], "num_inner_steps": 2, "model_id": model_id}
    given |= {"output_parameter_pack_path": str(tmp_path / "out")}
    with refused("no shard_paths", 1):
        odd.ask("run_inner_loop", **given)


# ------------------------------------------------------------------ the state of an optimizer


def test_a_state_comes_back_as_it_was(module):
    blob = module("lockstep_worker.state_blob")
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
    blob = module("lockstep_worker.state_blob")
    data = blob.encoded({"a": torch.ones(4)})
    for wrong in (b"", data[:-1], data + b"0", b"x" + data, data[:30]):
        with pytest.raises(ValueError, match="state of an optimizer: "):
            blob.decoded(wrong)
    with pytest.raises(ValueError, match="dtype 'Tensor'; one of torch's"):
        blob.decoded(data.replace(b'"float32"', b'"Tensor" '))
    with pytest.raises(TypeError, match="state of an optimizer: object; numbers"):
        blob.encoded({"a": object()})
