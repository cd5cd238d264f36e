"""The contract of a workload: what becomes of its state, that a step repeats, what numbers mean."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.errors import LockstepError
from lockstep.files import read_json
from parts.publication import publish
from parts.workload import preflight
from pipeline import runfile
from tests import tiny
from tests.errors import refused
from tests.parts.workload import finished_run
from tests.parts.workload.finished_run import OWN_STEPS, verdict_of
from tests.parts.workload.test_commands import verify

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("source", "quick_workers")]
WAYS = {"gradient": {}, "worker": {"workload__inner": "worker", "model__LLM__optimizer": OWN_STEPS}}


def a_run(folder: Path, wrong: str | None = None, **changes) -> tuple[Path, Path]:
    location = {"Workload": {"shuffle": "DontShuffle"}}
    given = {
        "workload__factory": "contract_models:Mixed",
        "workload__config": {"wrong": wrong} if wrong else {},
        "model__LLM__data_location": location,
        "model__LLM__max_seq_len": 14,
        "config__global_batch_size_start": 32,
        "config__global_batch_size_end": 32,
        "peers__micro_batch": 8,
        "held_out__sequences": 64,
    }
    return finished_run.a_run(folder, **given | changes)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_state_is_trained_audited_exported_and_loaded_with_its_loss(
    way, tmp_path, module
):
    run_file, root = a_run(tmp_path, **WAYS[way])
    tiny.make(run_file, root)
    assert verdict_of(root)["accepted"] and verdict_of(root)["not_comparable"] is None
    numbers = read_json(root / "metrics/evaluate.json")
    trained = read_json(root / "metrics/train.json")
    assert numbers["held_out_loss"] == pytest.approx(trained["held_out_loss"], rel=1e-6)
    assert numbers["held_out_loss"] < trained["held_out_loss_before"]

    workload = module("contract_models", Path(__file__).parent).Mixed({})
    saved = torch.load(root / "data/export/model.pt", weights_only=True)
    (model := workload.model()).load_state_dict(saved)
    rows = {name: torch.from_numpy(part) for name, part in workload.dataset("held_out").items()}
    with torch.no_grad():
        total, count = workload.loss(model.eval(), rows)
        alone = [
            workload.loss(model, {k: x[i : i + 1] for k, x in rows.items()}) for i in range(64)
        ]
    assert float(total / count) == pytest.approx(numbers["held_out_loss"], rel=1e-5)
    losses_N, weights_N = np.array(alone, np.float64).T
    apart_N = losses_N - weights_N * losses_N.sum() / weights_N.sum()
    apart_G = apart_N.reshape(8, 8).sum(axis=1)  # of stretches of neighbouring rows
    error = np.sqrt(8 / 7 * (apart_G**2).sum()) / weights_N.sum()
    assert numbers["held_out_stderr"] == pytest.approx(error, rel=1e-5)
    params = load_file(root / "data/export/params.safetensors")
    assert torch.equal(torch.view_as_complex(params["phase"]), saved["phase"])
    assert saved["phase"].imag.abs().sum() > 0
    statistics = load_file(root / "data/export/statistics.safetensors")
    assert torch.equal(statistics["norm.running_mean"], saved["norm.running_mean"])
    np.testing.assert_allclose(statistics["norm.running_mean"], 5, atol=0.5)
    (u, v), kernel = (  # of the weights alone, whatever came before
        [saved[f"bound.parametrizations.weight.0._{name}"] for name in "uv"],
        saved["bound.parametrizations.weight.original"],
    )
    largest = torch.linalg.matrix_norm(kernel, 2)
    assert float(u @ kernel @ v) == pytest.approx(float(largest), rel=1e-3)
    if way == "gradient":
        publish.write(tmp_path / "published", run_file, root, 1, None)
        assert "measured again" in verify(tmp_path / "published").text


KILLED = """
import os, signal, sys
from pathlib import Path
from parts.workload import description, worker
from pipeline.run_stage import run_stage
source, run_file, root = map(Path, sys.argv[1:4])
after, steps = map(int, sys.argv[4:])  # the round before, and steps that are taken after it
description.SOURCE = worker.SOURCE = source
gradient, taken = worker.Worker.gradient, []

def killed(self, *given):
    files = root.glob("data/runs/*/transcript/rounds.jsonl")
    if any(file.read_bytes().count(b"\\n") == after for file in files):
        taken.append(given)
        if len(taken) > steps:
            os.kill(os.getpid(), signal.SIGKILL)
    return gradient(self, *given)

worker.Worker.gradient = killed
run_stage("train", run_file, root)
"""


def test_a_model_with_state_that_is_killed_between_rounds_and_within_one_ends_with_the_same_bytes(
    source, tmp_path
):
    run_file, root = a_run(tmp_path, config__total_steps=4)
    whole = tmp_path / "whole"
    tiny.make(run_file, whole, "download", "convert", "train")
    tiny.make(run_file, root, "download", "convert")
    for after, steps in ((1, 0), (2, 1)):
        done = tiny.python("-c", KILLED, source, run_file, root, after, steps)
        assert done.returncode == -signal.SIGKILL, done.stderr
    tiny.make(run_file, root, "train")
    assert tiny.contents(root / "data/trained") == tiny.contents(whole / "data/trained")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("wrong", "name"), [("teacher", "teacher"), ("counter", "steps")])
def test_what_moves_and_is_kept_by_nobody_is_refused_before_the_first_round(
    wrong, name, way, tmp_path
):
    run_file, root = a_run(tmp_path, wrong, **WAYS[way])
    with refused(f": {name} changed"):
        tiny.make(run_file, root, "download", "convert", "train")
    assert not any(path.read_bytes() for path in root.glob("data/runs/*/transcript/rounds.jsonl"))
    if wrong == "counter":  # `lockstep check` takes one step on these rows
        with pytest.raises(LockstepError, match=f": {name} changed"):
            list(preflight.rows(runfile.load(run_file), root / "data/shards"))


@pytest.mark.parametrize(("wrong", "way"), [("calls", "gradient"), ("noise", "worker")])
def test_a_step_that_does_not_repeat_is_one_line_before_the_first_round(wrong, way, tmp_path):
    run_file, root = a_run(tmp_path, wrong, **WAYS[way])
    with refused("same params, rows and seed gave loss", "repeats = false") as error:
        tiny.make(run_file, root, "download", "convert", "train")
    one, other, *_ = re.findall(r"\d+\.\d+", str(error.value).split("seed gave ")[1])
    assert one != other


def test_a_run_that_says_that_steps_do_not_repeat_accuses_nobody(tmp_path):
    run_file, root = a_run(tmp_path, "noise", workload__repeats=False)
    printed = tiny.make(run_file, root)
    verdict = verdict_of(root)
    assert verdict["replayed_windows"] == verdict["findings"] == [] and verdict["accepted"]
    assert "repeats = false" in verdict["not_comparable"] and "NOT COMPARABLE HERE" in printed
    assert (root / "data/export/params.safetensors").is_file()
    with pytest.raises(LockstepError, match="repeats = false"):
        publish.write(tmp_path / "published", run_file, root, 1, None)
