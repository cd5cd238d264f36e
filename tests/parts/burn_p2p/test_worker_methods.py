"""burn_p2p's methods: what a worker answers, over a real connection."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.errors import refused


def total(host, model_id):
    """The sum of a model's values, by which a test sees that it changed."""
    return host.ask("evaluate", model_id=model_id, split="sum")["metrics"]["sum"]


def test_hello_names_what_the_object_can_do(host):
    found = host.ask("hello")
    environment = found.pop("environment")
    assert [Path(file).name for file in found.pop("files")] == ["plain.py"]
    assert found == {
        "protocol_version": 2,
        "workload_name": "a plain one",
        "capabilities": [
            "artifact_path_io", "parameter_pack_export", "parameter_pack_import",
            "diloco_checkpoint_job", "exact_step_budget", "evaluate",
        ],
    }  # fmt: skip
    assert environment["numpy"] == np.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"machine", "device", "threads"} <= environment.keys()
    assert not {"torch", "jax"} & environment.keys()


def test_capability_probe_is_the_objects_own(host):
    assert host.ask("capability_probe")["capability"]["work_units_per_second"] == 2.0


def test_a_window_is_trained_and_metrics_are_json(host, model_id):
    before = total(host, model_id)
    found = host.ask("train_window", model_id=model_id, batches=[{}, {}])
    assert found == {"metrics": {"loss": 0.5, "worst": "inf", "ok": True, "note": "x"}}
    assert total(host, model_id) == pytest.approx(before + 12)


def test_a_metric_that_is_no_number_or_text_is_named(host, model_id):
    with refused("TypeError: metric 'bad' is a list"):
        host.ask("evaluate", model_id=model_id, split="bad")


@pytest.mark.parametrize("method", ["apply_patch", "merge_candidate_models"])
def test_what_a_round_does_no_worker_does(host, method):
    with refused(f"unknown method '{method}'"):
        host.ask(method, any="thing")


def test_artifacts_are_written_and_read_by_path(host, model_id, tmp_path):
    path = str(tmp_path / "artifact")
    host.ask("materialize_model_artifact", model_id=model_id, artifact_path=path)
    before = total(host, model_id)
    host.ask("train_window", model_id=model_id, batches=[{}])
    host.ask("load_model_artifact", model_id=model_id, artifact_path=path)
    assert total(host, model_id) == before


def test_a_released_model_is_gone_and_its_id_is_not_used_again(host, model_id):
    assert host.ask("release_model", model_id=model_id) == {"ok": True}
    assert host.ask("init_model", device="cpu")["model_id"] != model_id
    with refused(f"model '{model_id}' is not here"):
        host.ask("evaluate", model_id=model_id, split="sum")


def test_a_model_begins_the_same_each_time_and_with_another_seed_differently(host):
    ids = [
        host.ask("init_model", device="cpu", **seed)["model_id"] for seed in ({}, {}, {"seed": 1})
    ]
    one, same, other = (total(host, model_id) for model_id in ids)
    assert one == same != other


# ---- Packs ----


def export(host, model_id, path, **more):
    more.setdefault("state_dict_filter", {})
    path = str(path)
    host.ask(
        "export_parameter_pack",
        model_id=model_id, parameter_pack_path=path, model_schema_hash="a schema", **more,
    )  # fmt: skip
    return json.loads(Path(path, "manifest.json").read_text())


def test_a_plan_says_what_travels(host):
    given = {"include_globs": [], "exclude_globs": ["b"]}
    found = host.ask("parameter_pack_plan", device="cpu", state_dict_filter=given)
    assert found == {
        "uses_custom_parameter_pack_hooks": False,
        "layout_hash": found["layout_hash"],
        "included_keys": ["w"],
        "excluded_float_keys": ["b"],
        "ignored_non_float_keys": ["steps"],
        "parameter_count": 6,
        "tensors": [{"name": "w", "shape": [2, 3], "dtype": "torch.float32"}],
        "tied": {},
    }


def test_a_pack_is_written_and_read_bit_for_bit(host, model_id, tmp_path):
    host.ask("train_window", model_id=model_id, batches=[{}])
    manifest = export(host, model_id, tmp_path / "one")
    assert manifest["model_schema_hash"] == "a schema"
    assert manifest["parameter_count"] == 8
    values = np.fromfile(tmp_path / "one" / "values.f32le", "<f4")
    assert values[2:].sum() == pytest.approx(total(host, model_id))
    read = {"parameter_pack_path": str(tmp_path / "one"), "state_dict_filter": {}}
    other = host.ask("import_parameter_pack", device="cpu", **read)["model_id"]
    assert export(host, other, tmp_path / "two") == manifest
    both = [(tmp_path / name / "values.f32le").read_bytes() for name in ("one", "two")]
    assert both[0] == both[1]


def test_a_pack_of_another_layout_or_schema_is_refused_with_both_named(host, model_id, tmp_path):
    manifest = export(host, model_id, tmp_path, state_dict_filter={"include_globs": ["w"]})
    plan = host.ask("parameter_pack_plan", device="cpu", state_dict_filter={})
    read = {"parameter_pack_path": str(tmp_path), "device": "cpu"}
    with refused(manifest["layout_hash"], plan["layout_hash"]):
        host.ask("import_parameter_pack", **read, state_dict_filter={})
    read |= {"state_dict_filter": {"include_globs": ["w"]}, "model_schema_hash": "another"}
    with refused("'a schema'", "'another'"):
        host.ask("import_parameter_pack", **read)


# ---- Inner loops ----


def inner(host, model_id, path, *, ids="a", **more):
    return host.ask(
        "run_inner_loop",
        model_id=model_id,
        batches=[{"microshard_ids": [*ids]}],
        num_inner_steps=3,
        output_parameter_pack_path=str(path / "out"),
        model_schema_hash="a schema",
        require_exact_steps=True,
        **more,
    )


def test_an_inner_loop_leaves_the_pack_and_the_state_of_its_optimizer(host, model_id, tmp_path):
    before = total(host, model_id)
    found = inner(host, model_id, tmp_path)
    assert found["steps_completed"] == 3
    assert found["inner_optimizer_state_encoding"] == "mine"
    assert Path(found["inner_optimizer_state_path"]).read_bytes() == b"state"
    values = np.fromfile(tmp_path / "out" / "values.f32le", "<f4")
    assert values.sum() == pytest.approx(before + 18)
    assert total(host, model_id) == pytest.approx(before + 18)


def test_a_replayed_inner_loop_draws_the_same_numbers(host, model_id, tmp_path):
    draws = []
    for i, given in enumerate(({}, {"ids": "b"}, {}, {"seed": 1}, {"seed": 1})):
        (tmp_path / str(i)).mkdir()
        draws.append(inner(host, model_id, tmp_path / str(i), **given)["metrics"]["draw"])
    assert draws[0] == draws[2] != draws[1]
    assert draws[3] == draws[4] != draws[0]
