"""The examples in workloads/, each in a worker of its own."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.parts.workload.worker_host import WORKLOADS, Host, array_rows, inner_job, left_by

pytestmark = pytest.mark.long

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
TOKENS = {"kind": "tokens", "columns": ["inputs"], "length": 8}
WORDS = np.random.default_rng(0).integers(0, 50, (6, 8)).astype(np.int32)
LOOPS = {
    "hf_causal_lm:CausalLM": {"model": LLAMA, "learning_rate": 1e-2},
    "hf_trainer:WithTrainer": {"model": LLAMA, "arguments": {"learning_rate": 1e-2}},
}


def inner(host, folder, shards, spec=TOKENS, *, model_id=None, **more):
    """A loop in a new model, or on in one: what the worker answers, and the values that it left."""
    model_id = model_id or host.ask("init_model", device="cpu")["model_id"]
    given = inner_job(folder, shards, spec, **{"steps": len(shards)} | more)
    return host.ask("run_inner_loop", model_id=model_id, **given), left_by(given)


def descend(host, words, *, rate):
    """The losses before and after 30 steps of plain gradient descent."""
    given = host.write(words)
    before = np.mean(host.ask("measure", **given)["losses"])
    for step in range(30):
        host.ask("gradient", **given, seed=step)
        host.params -= rate * host.gradients
    return before, np.mean(host.ask("measure", **given)["losses"])


def pictures(count=32):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((count, 12, 12)).astype(np.float32)
    return array_rows(x=x, y=draw.integers(0, 10, count))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def causal_lm(tmp_path_factory, hugging_face_python):
    name, folder = "hf_causal_lm:CausalLM", tmp_path_factory.mktemp("lm")
    with Host(name, LOOPS[name], folder, python=hugging_face_python) as host:
        yield host


def test_every_example_is_shorter_than_70_lines():
    lengths = {path.name: len(path.read_text().splitlines()) for path in WORKLOADS.glob("*.py")}
    assert len(lengths) >= 5
    assert {name: length for name, length in lengths.items() if length >= 70} == {}


def test_the_classifier_learns_from_its_own_data(tmp_path, python):
    with Host("torch_classifier:Classifier", {"hidden": 16}, tmp_path, python=python) as host:
        able = host.process.hello.capabilities
        assert {"gradient", "measure", "evaluate", "dataset"} <= {*able}
        listed = host.ask("dataset", split="train", path=str(tmp_path / "data"))["arrays"]
        arrays = {part["name"]: np.load(tmp_path / "data" / part["file"]) for part in listed}
        words, spec = array_rows(**{name: array[:64] for name, array in arrays.items()})
        host.begin(spec)
        before = host.ask("evaluate_params", split="held_out")["metrics"]["loss"]
        first, last = descend(host, words, rate=0.1)
        assert last < first - 0.5
        assert host.ask("evaluate_params", split="held_out")["metrics"]["loss"] < before


def test_a_causal_lm_has_transformers_own_loss_and_comes_out_as_its_folder(causal_lm, tmp_path):
    from transformers import AutoModelForCausalLM

    found = causal_lm.begin(TOKENS)
    assert found["tied"] == {"model.embed_tokens.weight": "lm_head.weight"}
    first, last = descend(causal_lm, WORDS, rate=0.5)
    assert last < first - 0.1
    causal_lm.ask("save_params", path=str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.from_numpy(WORDS).long()
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert last == pytest.approx(loss, rel=1e-5)


def test_labels_that_do_not_count_are_not_counted(causal_lm):
    columns = {"kind": "tokens", "columns": ["inputs", "labels"], "length": 8}
    causal_lm.begin(columns)
    some = np.where(np.arange(8) < 4, WORDS, -100)
    given = causal_lm.write(np.concatenate([WORDS, some], axis=1).astype(np.int32))
    counted = causal_lm.ask("measure", **given)["losses"]
    causal_lm.begin({**TOKENS, "length": 4})
    short = causal_lm.ask("measure", **causal_lm.write(np.ascontiguousarray(WORDS[:, :4])))
    np.testing.assert_allclose(counted, short["losses"], rtol=1e-5)


@pytest.mark.parametrize("factory", LOOPS)
def test_an_optimizers_state_goes_on_exactly_from_loop_to_loop(
    factory, tmp_path, hugging_face_python
):
    shards = [WORDS[:3], WORDS[3:], WORDS[1:4], WORDS[2:5]]
    with Host(factory, LOOPS[factory], tmp_path / "own", python=hugging_face_python) as host:
        found, whole = inner(host, tmp_path / "whole", shards)
        model_id = host.ask("init_model", device="cpu")["model_id"]
        first, _ = inner(host, tmp_path / "one", shards[:2], model_id=model_id)
        state = {"inner_optimizer_state_path": first["inner_optimizer_state_path"]}
        second, two = inner(host, tmp_path / "two", shards[2:], model_id=model_id, **state)
        factors = {"learning_rate_factors": [1.0, 0.0, 0.0, 0.0]}  # the run's, and no others
        scaled, alone = (
            inner(host, tmp_path / f"{len(lots)}", lots, **more)[1]
            for lots, more in ((shards, factors), (shards[:1], {}))
        )
    np.testing.assert_array_equal(two, whole)
    np.testing.assert_array_equal(scaled, alone)
    assert found["steps_completed"] == 4
    states = [Path(part["inner_optimizer_state_path"]).read_bytes() for part in (found, second)]
    assert states[0] == states[1]
    losses = [part["metrics"]["loss"] for part in (first, second, found)]
    assert losses[2] == pytest.approx((losses[0] + losses[1]) / 2)


def test_the_runs_schedule_scales_each_groups_own_rate(causal_lm, tmp_path):
    _, begun = inner(causal_lm, tmp_path / "begun", [WORDS], steps=0)
    for name, factors, least, most in (("still", [0, 0], 0, 0), ("moved", [0, 0.5], 2e-3, 6e-3)):
        more = {"steps": 2, "learning_rate_factors": factors}
        _, found = inner(causal_lm, tmp_path / name, [WORDS], **more)
        assert least <= np.abs(found - begun).max() <= most  # half of the 1e-2 in its config


def test_labels_of_unequal_number_weigh_alike_in_any_micro_batch(causal_lm):
    columns = {"kind": "tokens", "columns": ["inputs", "labels"], "length": 8}
    counted = np.arange(8) < np.array([8, 5, 3, 2])[:, None]
    labels = np.where(counted, WORDS[:4], -100)
    words = np.concatenate([WORDS[:4], labels], axis=1).astype(np.int32)
    found = []
    for size in (4, 2, 1):
        causal_lm.begin(columns, micro_batch=size)
        loss = causal_lm.ask("gradient", **causal_lm.write(words), seed=0)["loss"]
        found.append((loss, causal_lm.gradients.copy()))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        np.testing.assert_allclose(gradients, found[0][1], rtol=1e-3, atol=1e-6)


def packed(columns):
    """Two rows of two sequences and padding, and what says so; a change of one moves its own."""
    ids = np.tile([0, 0, 0, 1, 1, 1, 2, 2], (2, 1))
    labels = np.where(np.tile([0, 1, 1, 0, 1, 1, 0, 0], (2, 1)), WORDS[:2], -100)
    places = np.tile([0, 1, 2, 0, 1, 2, 0, 1], (2, 1))
    parts = {"labels": labels, "position_ids": places, "sequence_ids": ids}
    words = [WORDS[:2], *(parts[name] for name in columns)]
    spec = {"kind": "tokens", "columns": ["inputs", *columns], "length": 8}
    return np.concatenate(words, axis=1).astype(np.int32), spec


@pytest.mark.parametrize("columns", [["labels", "sequence_ids"], ["labels", "position_ids"]])
def test_packed_sequences_are_trained_each_alone_and_by_a_trainer_too(
    tmp_path, columns, hugging_face_python
):
    words, spec = packed(columns)
    apart = np.concatenate([words[:, :3], words[:, 3:6]]).astype(np.int32)
    alone = {"kind": "tokens", "columns": ["inputs"], "length": 3}
    found = {}
    for name, config in LOOPS.items():
        config = config | {"model": LLAMA | {"max_position_embeddings": 32}}
        folder = tmp_path / name.split(":")[1]
        with Host(name, config, folder, python=hugging_face_python) as host:
            for rows, of in ((words, spec), (apart, alone)):
                host.begin(of)
                loss = host.ask("gradient", **host.write(rows), seed=0)["loss"]
                answer, _ = inner(host, folder / f"{len(rows)}", [rows], of)
                trained = answer["metrics"]["loss"]
                found[name, len(rows)] = loss
                assert trained == pytest.approx(loss, rel=1e-5)
    assert len({round(loss, 4) for loss in found.values()}) == 1


def test_lora_moves_adapters_alone_and_writes_pefts_files(tmp_path, hugging_face_python):
    config = {"model": LLAMA, "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
    with Host("hf_causal_lm:CausalLM", config, tmp_path, python=hugging_face_python) as host:
        assert host.ask("capability_probe")["suggests"] == {"learning_rate": 2e-4}
        found = host.begin(TOKENS)
        assert {tensor["name"].split(".")[-3] for tensor in found["tensors"]} <= {
            "lora_A", "lora_B",
        }  # fmt: skip
        assert found["parameter_count"] == 2 * 2 * (2 * 16 + 2 * 16)
        plan = host.ask("parameter_pack_plan", device="cpu", state_dict_filter={})
        assert plan["parameter_count"] == found["parameter_count"]
        first, last = descend(host, WORDS, rate=1.0)
        assert last < first
        (tmp_path / "saved").mkdir()
        host.ask("save_params", path=str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_a_strangers_arguments_say_how_a_step_is_taken_and_nothing_else(monkeypatch):
    """An auditor's token must not push where the author's config says."""
    base = type("CausalLM", (), {"__init__": lambda self, config: None})
    stubs = {"hf_causal_lm": {"CausalLM": base}, "lockstep_worker": {"jobs": 0, "state_blob": 0}}
    names = ("Trainer", "TrainingArguments", "default_data_collator")
    stubs |= {"transformers": dict.fromkeys(names, 0), "torch": {}}
    stubs |= {"torch.optim.lr_scheduler": {"LambdaLR": 0}}
    for name, content in stubs.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    trainer = runpy.run_path(str(WORKLOADS / "hf_trainer.py"))["WithTrainer"]
    trainer({"arguments": {"learning_rate": 1e-2, "weight_decay": 0.1}})
    writes = ["push_to_hub", "hub_token", "report_to", "output_dir", "deepspeed"]
    other_steps = ["max_steps", "gradient_accumulation_steps", "lr_scheduler_type", "warmup_steps"]
    for name in (*writes, *other_steps):
        with pytest.raises(ValueError, match=f"arguments has {name}, expected some of "):
            trainer({"arguments": {"learning_rate": 1e-2, name: "x"}})


def test_a_linen_model_needs_no_base_class(tmp_path):
    with Host("linen_model:Linen", {"hidden": 8}, tmp_path) as host:
        words, spec = pictures()
        found = host.begin(spec)
        assert [tensor["name"] for tensor in found["tensors"]] == [
            "Dense_0.bias", "Dense_0.kernel", "Dense_1.bias", "Dense_1.kernel",
        ]  # fmt: skip
        first, last = descend(host, words, rate=0.1)
        assert last < first - 0.3
        assert "jax" in host.process.greet().environment
