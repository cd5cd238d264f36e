"""A whole tiny run: accepted when honest, refused with a name when not, and extended at will."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.language_model.held_out import spread
from pipeline.stage.keys import Keys
from tests import tiny

pytestmark = pytest.mark.long

UP_TO_VERDICT = ("download", "convert", "train", "witness")


LLAMA = ("HfLlama", tiny.MODEL, 0.0)
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
WITH_EXPERTS = ("HfDeepseek", tiny.DEEPSEEK | ONE_LAYER, 0.01)


@pytest.mark.parametrize(
    ("architecture", "model", "balance_speed"),
    [LLAMA, pytest.param(*WITH_EXPERTS, marks=pytest.mark.soak)],
    ids=["llama", "experts"],
)
def test_an_honest_run_learns_is_accepted_and_loads_in_transformers(
    tmp_path, architecture, model, balance_speed
):
    run_file, root = tiny.start(
        tmp_path,
        config__total_steps=40,
        model__LLM__architecture=architecture,
        model__LLM__checkpoint={"Init": {"seed": 0, "config": model}},
        peers__balance_speed=balance_speed,
        model__LLM__lr_schedule={
            "Constant": {"base_lr": 6e-3, "warmup_init_lr": 0.0, "warmup_steps": 5}
        },
    )
    tiny.make(run_file, root)
    metrics, verdict = (
        read_json(root / "metrics" / f"{stage}.json") for stage in ("train", "witness")
    )
    assert metrics["held_out_loss"] < metrics["held_out_loss_before"] - 0.5
    assert verdict["accepted"] and verdict["comparable"]
    model = AutoModelForCausalLM.from_pretrained(root / "data/export", dtype=torch.float32)
    tokens = np.fromfile(root / "data/shards/held_out/00000.ds", "<u2")
    rows = tokens[: tokens.size // 16 * 16].reshape(-1, 16).astype(np.int64)
    tokens = torch.tensor(rows[spread(len(rows), 4, runfile.load(run_file).peers.seed)])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    evaluated = read_json(root / "metrics/evaluate.json")
    assert evaluated["held_out_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["held_out_loss"] == pytest.approx(loss, abs=1e-4)


def test_a_peer_that_flips_signs_is_named_and_its_run_refused(tmp_path):
    fault = {"kind": "sign_flip", "peer": 1, "rounds": [5, 5]}
    run_file, root = tiny.start(tmp_path, faults__schedule=[fault])
    tiny.make(run_file, root)
    verdict = read_json(root / "data/verdict/verdict.json")
    assert not verdict["accepted"]
    assert [(f["round"], f["peer"], f["kind"]) for f in verdict["findings"]] == [(5, 1, "message")]
    refused = read_json(root / "data/export/refused.json")
    assert refused["findings"] == verdict["findings"]
    assert not list((root / "data/export").glob("*.safetensors"))
    assert read_json(root / "metrics/evaluate.json")["held_out_loss"] is None
    assert "peer 1" in (root / "data/report/report.html").read_text()


def test_an_extended_run_is_bit_for_bit_the_longer_run(tmp_path):
    changes = {"peers__overlap": 2}  # what messages are under way belongs to the state too
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_file, root = tiny.start(whole, config__total_steps=6, **changes)
    tiny.make(run_file, root, *UP_TO_VERDICT)
    expected = tiny.contents(root / "data/trained/transcript/snapshots/00006")

    run_file, root = tiny.start(parts, config__total_steps=3, **changes)
    tiny.make(run_file, root, "download", "convert", "train")
    key = Keys(run_file).key("train")
    tiny.start(parts, config__total_steps=6, model__LLM__checkpoint={"Run": key}, **changes)
    tiny.make(run_file, root, *UP_TO_VERDICT)
    assert tiny.contents(root / "data/trained/transcript/snapshots/00006") == expected
    assert read_json(root / "data/verdict/verdict.json")["accepted"]
    assert read_json(root / "data/trained/final.json")["step"] == 6


def test_a_liar_is_named_where_values_travel_on_psyches_wire_during_the_next_round(tmp_path):
    run_file, root = tiny.start(
        tmp_path,
        peers__overlap=1,
        peers__wire="psyche",
        model__LLM__optimizer__Distro__quantize_1bit=False,
        links__tokens_per_second=16.0,
        faults__schedule=[{"kind": "sign_flip", "peer": 1, "rounds": [2, 2]}],
    )
    tiny.make(run_file, root, *UP_TO_VERDICT)
    entry = Transcript(root / "data/trained/transcript").rounds[0]
    assert entry.evidence.arrivals == {0: 2.0, 1: 2.0}  # of 32 tokens; the travel is hidden
    findings = read_json(root / "data/verdict/verdict.json")["findings"]
    assert [(f["round"], f["peer"]) for f in findings] == [(2, 1)]


def test_an_uneven_ramped_batch_trains_and_audits_clean(tmp_path):
    run_file, root = tiny.start(
        tmp_path,
        config__global_batch_size_start=1,
        config__global_batch_size_end=5,
        config__global_batch_size_warmup_tokens=16 * 8,
    )
    tiny.make(run_file, root, *UP_TO_VERDICT)
    lines = (root / "data/trained/transcript/rounds.jsonl").read_text().splitlines()
    sizes = [json.loads(line)["round"]["batch_size"] for line in lines]
    assert sizes[0] == 1 and sizes[-1] == 5 and len(set(sizes)) > 2
    assert read_json(root / "data/verdict/verdict.json")["accepted"]


def test_a_fused_layout_trains_alike_and_is_not_comparable_as_compiled(tmp_path):
    found, lie = {}, {"kind": "sign_flip", "peer": 1, "rounds": [6, 6]}
    for name, faults in (("each", []), ("shard_map", []), ("vmap", [lie])):
        changes = {"peers__layout": name, "peers__count": 3, "faults__schedule": faults}
        run_file, root = tiny.start(tmp_path / name, **changes)
        tiny.make(run_file, root, *UP_TO_VERDICT)
        found[name] = read_json(root / "metrics/train.json")["held_out_loss"]
        verdict = read_json(root / "data/verdict/verdict.json")
        assert verdict["accepted"] and verdict["findings"] == []
        is_fused = name != "each"
        assert (verdict["not_comparable"] is not None) == is_fused
        assert (verdict["replayed_windows"] == []) == is_fused
    assert found["shard_map"] == pytest.approx(found["each"], abs=2e-3)
