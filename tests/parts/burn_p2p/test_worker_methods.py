"""burn_p2p's methods: what a worker answers, over a real connection."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parts.burn_p2p.totals import total
from tests.parts.workload.worker_host import WorkerError


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
    found = host.ask("capability_probe")
    assert found["runtime_device"] == "cpu"
    assert found["capability"]["work_units_per_second"] == 2.0


def test_a_window_is_trained_and_metrics_are_json(host, model_id):
    before = total(host, model_id)
    found = host.ask("train_window", model_id=model_id, batches=[{}, {}])
    assert found == {"metrics": {"loss": 0.5, "worst": "inf", "ok": True, "note": "x"}}
    assert total(host, model_id) == pytest.approx(before + 12)


def test_a_metric_that_is_no_number_or_text_is_named(host, model_id):
    with pytest.raises(WorkerError, match="TypeError: metric 'bad' is a list"):
        host.ask("evaluate", model_id=model_id, split="bad")


@pytest.mark.parametrize("method", ["apply_patch", "merge_candidate_models"])
def test_what_a_round_does_no_worker_does(host, method):
    with pytest.raises(WorkerError, match=f"unknown method '{method}'"):
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
    with pytest.raises(WorkerError, match=f"model '{model_id}' is not here"):
        host.ask("evaluate", model_id=model_id, split="sum")


def test_a_model_begins_the_same_each_time_and_with_another_seed_differently(host):
    ids = [
        host.ask("init_model", device="cpu", **seed)["model_id"] for seed in ({}, {}, {"seed": 1})
    ]
    one, same, other = (total(host, model_id) for model_id in ids)
    assert one == same != other
