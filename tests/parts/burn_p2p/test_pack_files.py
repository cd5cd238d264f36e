"""Packs: what travels of a model, bit for bit, and which packs are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.parts.burn_p2p.totals import total
from tests.parts.workload.worker_host import Host, WorkerError

SCHEMA = "a schema"


def export(host, model_id, path, **more):
    more.setdefault("state_dict_filter", {})
    path = str(path)
    host.ask(
        "export_parameter_pack",
        model_id=model_id, parameter_pack_path=path, model_schema_hash=SCHEMA, **more,
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
    assert manifest["model_schema_hash"] == SCHEMA
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
    with pytest.raises(WorkerError) as error:
        host.ask("import_parameter_pack", **read, state_dict_filter={})
    line = str(error.value).splitlines()[0]
    assert manifest["layout_hash"] in line and plan["layout_hash"] in line
    same = {"include_globs": ["w"]}
    with pytest.raises(WorkerError, match="'a schema', expected 'another'"):
        host.ask(
            "import_parameter_pack", **read, state_dict_filter=same, model_schema_hash="another"
        )


def test_a_workload_may_write_and_read_its_packs_itself(folder, tmp_path):
    with Host("plain:OwnPacks", {}, folder) as own:
        plan = own.ask("parameter_pack_plan", device="cpu", state_dict_filter={})
        assert plan["uses_custom_parameter_pack_hooks"] and plan["layout_hash"] is None
        model_id = own.ask("init_model", device="cpu")["model_id"]
        place = {"parameter_pack_path": str(tmp_path), "state_dict_filter": {}}
        own.ask("export_parameter_pack", model_id=model_id, model_schema_hash=SCHEMA, **place)
        other = own.ask("import_parameter_pack", device="cpu", **place)["model_id"]
        assert (total(own, model_id), total(own, other)) == (3.0, 6.0)
