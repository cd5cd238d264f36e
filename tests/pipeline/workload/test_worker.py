"""The worker's protocol, over a real connection: what it answers, and what it refuses."""

import hashlib
import importlib
import json
import struct
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.workload.worker_host import PYTHON, Host, WorkerError, array_rows

PLAIN = """
    import os, random, sys, time
    import numpy as np

    class Plain:
        workload_name = "a plain one"

        def __init__(self, config):
            self.config = config

        def runtime_device(self):
            return "cpu"

        def capability_probe(self):
            return {"preferred_backends": ["cpu"], "work_units_per_second": 2.0,
                    "target_window_seconds": 3}

        def init_model(self, device):
            return {"w": np.random.standard_normal((2, 3)).astype(np.float32),
                    "b": np.zeros(2, np.float16), "steps": np.zeros(1, np.int64)}

        def train_window(self, state, batches):
            state["w"] = state["w"] + len(batches)
            return {"loss": np.float32(0.5), "worst": float("inf"), "ok": True, "note": "x"}

        def evaluate(self, state, split):
            return {"bad": [1]} if split == "bad" else {split: float(state["w"].sum())}

        def load_model_artifact(self, state, data):
            state["w"] = np.frombuffer(data, np.float32).reshape(2, 3)

        def materialize_model_artifact(self, state):
            return state["w"].tobytes()

        def merge_candidate_models(self, base, candidates, policy):
            if policy == "none":
                return None
            return {**base, "w": sum(c["model"]["w"] * c["sample_weight"] for c in candidates)}

        def apply_single_root_ema(self, base, merged, policy):
            return {**merged, "w": (base["w"] + merged["w"]) / 2}

        def reconcile_canonical_model(self, local, canonical, strategy):
            canonical["w"] = local["w"] * strategy["factor"]

        def run_inner_loop(self, state, job):
            draw = random.random() + float(np.random.random())
            with open(f"{job['output_parameter_pack_path']}.state", "wb") as file:
                file.write(b"state")
            state = {**state, "w": state["w"] + job["num_inner_steps"]}
            taken = job["num_inner_steps"] - (job["batches"][0].get("short", 0))
            return {"state": state, "steps_completed": taken, "metrics": {"draw": draw},
                    "inner_optimizer_state_path": file.name,
                    "inner_optimizer_state_encoding": "mine"}

    def broken(config):
        raise RuntimeError("two\\nlines")

    def slow(config):
        time.sleep(1)
        return Plain(config)

    class Hanging(Plain):
        def train_window(self, state, batches):
            while True:
                time.sleep(1)
"""
SCHEMA = "a schema"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.py").write_text(textwrap.dedent(PLAIN))
    return folder


@pytest.fixture(scope="module")
def host(folder):
    with Host("plain:Plain", {"a": 1}, folder) as host:
        yield host


@pytest.fixture
def model_id(host):
    return host.ask("init_model", device="cpu")["model_id"]


def total(host, model_id):
    return host.ask("evaluate", model_id=model_id, split="sum")["metrics"]["sum"]


def export(host, model_id, path, **more):
    more.setdefault("state_dict_filter", {})
    path = str(path)
    host.ask(
        "export_parameter_pack",
        model_id=model_id, parameter_pack_path=path, model_schema_hash=SCHEMA, **more,
    )  # fmt: skip
    return json.loads(Path(path, "manifest.json").read_text())


# ------------------------------------------------------------------------ burn_p2p's methods


def test_hello_names_what_the_object_can_do(host):
    found = host.ask("hello")
    environment = found.pop("environment")
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


def test_patches_are_rejected_by_an_object_without_them(host):
    assert host.ask("apply_patch", any="thing") == {"Rejected": "a plain one has no apply_patch"}


def test_artifacts_are_written_and_read_by_path(host, model_id, tmp_path):
    path = str(tmp_path / "artifact")
    host.ask("materialize_model_artifact", model_id=model_id, artifact_path=path)
    before = total(host, model_id)
    host.ask("train_window", model_id=model_id, batches=[{}])
    host.ask("load_model_artifact", model_id=model_id, artifact_path=path)
    assert total(host, model_id) == before


def test_models_are_merged_averaged_and_reconciled(host, model_id):
    more = {"peer_id": "p", "head_id": "h", "artifact_id": "a", "quality_weight": 1.0}
    candidates = [{"model_id": model_id, "sample_weight": weight, **more} for weight in (1.0, 2.0)]
    given = {"base_model_id": model_id, "candidates": candidates}
    assert host.ask("merge_candidate_models", **given, policy="none") == {"model_id": None}
    merged = host.ask("merge_candidate_models", **given, policy="WeightedMean")["model_id"]
    one = total(host, model_id)
    assert total(host, merged) == pytest.approx(3 * one)
    given = {"base_model_id": model_id, "merged_model_id": merged}
    assert host.ask("apply_single_root_ema", **given, policy="Ema") == {"model_id": merged}
    assert total(host, merged) == pytest.approx(2 * one)
    given = {"local_model_id": model_id, "canonical_model_id": merged}
    found = host.ask("reconcile_canonical_model", **given, strategy={"factor": 5})
    assert found == {"model_id": merged}
    assert total(host, merged) == pytest.approx(5 * one)


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


# ------------------------------------------------------------------------------------- packs


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
    assert manifest["layout_hash"] in line and plan["layout_hash"] in line and SCHEMA in line
    same = {"include_globs": ["w"]}
    with pytest.raises(WorkerError, match="schema 'a schema'; .* schema 'another' expected"):
        host.ask(
            "import_parameter_pack", **read, state_dict_filter=same, model_schema_hash="another"
        )


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda path: flip(path / "values.f32le"), "its manifest has"),
        (lambda path: shorten(path / "values.f32le"), "31 bytes; 4 for each of 8 values expected"),
        (lambda path: edit(path, format="another"), "format 'another'"),
        (lambda path: edit(path, values_f32_le="../values.f32le"), "a file in the pack's folder"),
    ],
)
def test_a_damaged_pack_is_refused(host, model_id, tmp_path, damage, expected):
    export(host, model_id, tmp_path)
    damage(tmp_path)
    read = {"parameter_pack_path": str(tmp_path), "device": "cpu", "state_dict_filter": {}}
    with pytest.raises(WorkerError, match=expected):
        host.ask("import_parameter_pack", **read)


def test_a_pack_without_the_hash_of_its_values_is_read(host, model_id, tmp_path):
    """burn_p2p writes none."""
    export(host, model_id, tmp_path)
    edit(tmp_path, values_sha256=None)
    read = {"parameter_pack_path": str(tmp_path), "device": "cpu", "state_dict_filter": {}}
    assert host.ask("import_parameter_pack", **read)["model_id"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not None}
    (path / "manifest.json").write_text(json.dumps(manifest))


# ------------------------------------------------------------------------------- inner loops


def inner(host, model_id, path, *, ids=("a",), short=0, **more):
    return host.ask(
        "run_inner_loop",
        model_id=model_id,
        batches=[{"kind": "cached_microshard_group", "microshard_ids": list(ids), "short": short}],
        num_inner_steps=3,
        inner_optimizer_state_path=None,
        output_parameter_pack_path=str(path / "out"),
        model_schema_hash=SCHEMA,
        require_exact_steps=True,
        state_dict_filter={},
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
    for i, given in enumerate(({}, {"ids": ("b",)}, {}, {"seed": 1}, {"seed": 1})):
        (tmp_path / str(i)).mkdir()
        draws.append(inner(host, model_id, tmp_path / str(i), **given)["metrics"]["draw"])
    assert draws[0] == draws[2] != draws[1]
    assert draws[3] == draws[4] != draws[0]


def test_an_inner_loop_of_another_number_of_steps_is_refused(host, model_id, tmp_path):
    with pytest.raises(WorkerError, match="run_inner_loop took 2 steps; 3 expected"):
        inner(host, model_id, tmp_path, short=1)


# ------------------------------------------------------------- the contract without a framework


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    with Host("line_model:Line", {}, folder, paths=[Path(__file__).parent]) as host:
        yield host


def line_rows(count):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((count, 3)).astype(np.float32)
    return array_rows(x=x, y=draw.standard_normal(count).astype(np.float32)), x


def test_functions_over_arrays_are_enough(line):
    (words, spec), x = line_rows(5)
    found = line.begin(spec, micro_batch=2, exclude=["kept"])
    assert [tensor["name"] for tensor in found["tensors"]] == ["b", "w"]
    assert found["tensors"][0]["dtype"] == "torch.float64"
    assert found["frozen"] == [{"name": "kept", "why": "excluded"}]
    assert found["integers"] == ["order"]
    w = np.random.default_rng(0).standard_normal(3, np.float32)
    np.testing.assert_array_equal(line.params, [0, *w])
    loss = line.ask("gradient", **line.write(words), seed=0)["loss"]
    error = x @ w - words[:, 3].copy().view("<f4")
    assert loss == pytest.approx((error**2).mean())
    np.testing.assert_allclose(line.gradients[0], 2 * error.mean(), rtol=1e-5)
    np.testing.assert_allclose(line.gradients[1:], 2 * error @ x / 5, rtol=1e-5)
    losses = line.ask("measure", **line.write(words))["losses"]
    np.testing.assert_allclose(losses, error**2, rtol=1e-5)


def test_a_loss_that_draws_numbers_is_measured_alike_each_time(folder):
    with Host("line_model:Line", {"noise": True}, folder, paths=[Path(__file__).parent]) as host:
        (words, spec), x = line_rows(4)
        host.begin(spec, micro_batch=2, exclude=["kept"])
        first, alone = (host.ask("measure", **host.write(rows)) for rows in (words, words[2:]))
        evaluated = host.ask("evaluate_params", split="held_out")
        host.ask("gradient", **host.write(words), seed=1)
        assert host.ask("evaluate_params", split="held_out") == evaluated
        assert host.ask("measure", **host.write(words)) == first
        assert alone["losses"] == first["losses"][2:]  # whichever rows come before
        error = x @ host.split(host.params)["w"] - words[:, 3].copy().view("<f4")
        noise = first["losses"] - error**2
        assert len({round(float(value), 3) for value in noise}) == 4  # micro-batches draw others


def test_params_are_evaluated_and_saved_as_they_are(line, tmp_path):
    (_, spec), _ = line_rows(1)
    line.begin(spec, exclude=["kept"])
    line.params[:] = [7, 1, 2, 3]
    found = line.ask("evaluate_params", split="held_out")["metrics"]
    assert found == {"split": "held_out", "bias": 7, "nothing": "nan", "fine": True}
    line.ask("save_params", path=str(tmp_path))
    saved = np.load(tmp_path / "saved.npz")
    np.testing.assert_array_equal(saved["w"], [1, 2, 3])
    np.testing.assert_array_equal(saved["kept"], [1, 1])


def test_a_dataset_is_written_as_files_of_numpy(line, tmp_path):
    found = line.ask("dataset", split="train", path=str(tmp_path / "new"))["arrays"]
    assert found[0] == {"name": "x", "file": "x.npy", "dtype": "float32", "shape": [4, 3]}
    assert np.load(tmp_path / "new" / "y.npy").shape == (4,)


def test_arrays_begin_as_an_inner_loop_would_have_them(line):
    model_id = line.ask("init_model", device="cpu", seed=3)["model_id"]
    assert model_id == "m1"


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ("shape", r"gradient 'w': shape \(1, 3\); \(3,\) expected"),
        ("names", r"gradients: missing \['b'\], not expected \['extra'\]"),
    ],
)
def test_wrong_gradients_are_refused(tmp_path, wrong, expected):
    (words, spec), _ = line_rows(2)
    paths = [Path(__file__).parent]
    with Host("line_model:Line", {"wrong": wrong}, tmp_path, paths=paths) as host:
        host.begin(spec, exclude=["kept"])
        with pytest.raises(WorkerError, match=expected):
            host.ask("gradient", **host.write(words), seed=0)


@pytest.mark.parametrize(
    "method, params, expected",
    [
        ("gradient", {"rows": 0, "width": 4, "seed": 0}, "0 rows of 4 words"),
        ("gradient", {"rows": 1, "width": 3, "seed": 0}, "rows of 4 words expected"),
        ("measure", {"rows": 4096, "width": 4}, "room for 1024 words"),
        ("gradient", {"rows": 1, "width": 4}, "'seed' is missing"),
        ("open_arrays", {"params": [0, 9], "gradients": [0, 4], "rows": [0, 4]}, "params of 9"),
        ("open_arrays", {"params": [0, 4], "gradients": [9999, 4], "rows": [0, 4]}, "gradients"),
        ("begin", {"rows": {"kind": "words"}, "micro_batch": 1}, "rows of kind 'words'"),
        ("save", {}, "unknown method 'save'"),
    ],
)
def test_what_does_not_fit_is_refused(line, method, params, expected):
    (words, spec), _ = line_rows(1)
    line.begin(spec, exclude=["kept"])
    if method == "open_arrays":
        params = {**params, "path": str(line.folder / "arrays")}
    with pytest.raises(WorkerError, match=expected):
        line.ask(method, **params)


def test_a_step_before_its_time_is_refused(tmp_path, host):
    paths, early = (
        [Path(__file__).parent],
        pytest.raises(WorkerError, match="gradient before begin"),
    )
    with Host("line_model:Line", {}, tmp_path, paths=paths) as other, early:
        other.ask("gradient", rows=1, width=4, seed=0)
    with pytest.raises(WorkerError, match="Plain has no gradient"):
        host.ask("begin")


def test_rows_of_tokens_and_files_are_decoded(rows_module):
    words = np.arange(8, dtype=np.int32).reshape(2, 4)
    one = {"kind": "tokens", "columns": ["inputs"], "length": 4}
    np.testing.assert_array_equal(rows_module.decoded(words, one), words)
    assert rows_module.decoded(words, one).dtype == np.int64
    two = {"kind": "tokens", "columns": ["inputs", "labels"], "length": 2}
    found = rows_module.decoded(words, two)
    np.testing.assert_array_equal(found["labels"], [[2, 3], [6, 7]])
    digest = hashlib.sha256(b"a file").digest()
    files = {"kind": "files", "folder": "/there"}
    found = rows_module.decoded(np.frombuffer(digest, "<i4").reshape(1, 8), files)
    assert found == [f"/there/{digest.hex()}"]


def test_arrays_of_any_width_come_out_of_their_words(rows_module):
    draw = np.random.default_rng(0)
    arrays = {
        "bytes": draw.integers(0, 255, (3, 5), np.uint8),
        "one": draw.integers(0, 9, 3),
        "halves": draw.standard_normal((3, 3, 1)).astype(np.float16),
    }
    words, spec = array_rows(**arrays)
    found = rows_module.decoded(words, spec)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


@pytest.fixture
def rows_module(monkeypatch):
    monkeypatch.syspath_prepend(str(PYTHON))
    return importlib.import_module("lockstep_worker.rows")


# -------------------------------------------------------------------------- the connection


def test_a_factory_that_takes_long_is_waited_for(folder):
    """burn_p2p's hosts give a worker 10 s to connect, and any time to answer."""
    with Host("plain:slow", {}, folder) as host:
        assert host.ask("hello")["workload_name"] == "a plain one"


@pytest.mark.parametrize(
    "factory, config, expected",
    [
        ("plain:broken", "{}", "RuntimeError: two lines\nTraceback"),
        ("plain:missing", "{}", "AttributeError: module 'plain' has no attribute 'missing'\n"),
        ("plain", "{}", "ValueError: factory 'plain'; module:attr expected\n"),
        ("plain:Plain", "{", "JSONDecodeError: "),
    ],
)
def test_a_factory_that_fails_is_the_answer_to_hello(folder, factory, config, expected):
    with Host(factory, config, folder) as host:
        for _ in range(2):
            with pytest.raises(WorkerError, match=f"^{expected}"):
                host.ask("hello")
        assert host.ask("shutdown") == {"ok": True}
        assert host.process.wait(20) == 0


def test_an_unknown_method_and_a_request_that_is_none_are_answered(host):
    with pytest.raises(WorkerError, match="unknown method 'fly'"):
        host.ask("fly")
    host.send([1])
    answer = host.receive()
    assert not answer["ok"] and "unknown method None" in answer["error"]
    assert host.ask("hello")


@pytest.mark.parametrize(
    "data, expected",
    [
        (struct.pack(">Q", 1 << 40), b"worker: frame of 1099511627776 bytes; at most"),
        (struct.pack(">Q", 1) + b"{", b"worker: Expecting property name"),
    ],
)
def test_a_frame_too_long_or_no_json_ends_the_worker_in_one_line(folder, data, expected):
    with Host("plain:Plain", {}, folder) as host:
        host.sock.sendall(data)
        _, errors = host.process.communicate(timeout=20)
        assert errors.startswith(expected) and errors.count(b"\n") == 1


def test_a_worker_whose_host_goes_ends(folder):
    with Host("plain:Plain", {}, folder) as host:
        host.ask("hello")
        host.sock.close()
        assert host.process.wait(20) == 0


def test_a_worker_whose_host_goes_while_it_computes_ends_too(folder):
    with Host("plain:Hanging", {}, folder) as host:
        model_id = host.ask("init_model", device="cpu")["model_id"]
        given = {"model_id": model_id, "batches": []}
        host.send({"id": 9, "method": "train_window", "params": given})
        host.sock.close()
        assert host.process.wait(20) in (0, 1)
