"""A workload through all stages: trained, killed, audited, exported and measured like any model."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.tables.validation import validate
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import load_arrays
from parts.workload import description, preflight
from parts.workload.process.messages import WorkerError
from parts.workload.subject import SUBJECT
from parts.workload.worker import Worker
from pipeline import runfile
from pipeline.preflight.preflight import Preflight
from pipeline.preflight.row import Mark
from tests import tiny
from tests.errors import refused
from tests.parts.workload.finished_run import CONFIG, FACTORY, OWN_STEPS, a_run, verdict_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_workers")]


def test_a_torch_model_without_a_flax_file_learns_and_its_audit_replays_every_window(finished):
    _, root, _ = finished
    verdict = verdict_of(root)
    assert verdict["accepted"] and verdict["not_comparable"] is None
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 6
    trained = read_json(root / "metrics/train.json")
    assert trained["held_out_loss"] < trained["held_out_loss_before"]


def test_the_export_is_the_params_by_the_names_of_the_module(finished):
    _, root, _ = finished
    exported = load_file(root / "data/export/params.safetensors")
    transcript = Transcript(root / "data/trained/transcript")
    last = transcript.folder / "snapshots" / f"{transcript.snapshots[-1]:05}"
    agreed = load_arrays(last / "params.safetensors")
    assert {name.replace(".", "/") for name in exported} == agreed.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, agreed[name.replace(".", "/")])
    gru = torch.nn.GRU(8, 8, batch_first=True)
    gru.load_state_dict(
        {k.removeprefix("gru."): torch.from_numpy(v) for k, v in exported.items() if "gru." in k}
    )


def test_report_and_card_name_the_workload_and_the_hash_of_its_code(finished):
    run_file, root, printed = finished
    code = description.code_hash(runfile.load(run_file))
    card = (root / "data/report/README.md").read_text()
    assert FACTORY in card and code in card and "nats per token" not in card
    assert FACTORY in (root / "data/report/report.html").read_text()
    header = Transcript(root / "data/trained/transcript").header
    assert header.model["workload"]["code"] == code
    assert header.environment["worker_torch"] == torch.__version__
    assert code[:12] in printed


def test_no_code_of_the_workload_leaves_with_transcript_verdict_or_export(finished):
    _, root, _ = finished
    source = (description.SOURCE / "torch_language_model.py").read_bytes().splitlines()
    telling = next(line for line in source if b"batch_first" in line).strip()
    for out in ("trained", "verdict", "export", "report"):
        for file in (root / "data" / out).rglob("*"):
            assert file.is_dir() or telling not in file.read_bytes(), file


def test_peers_in_processes_without_data_measure_a_model_with_statistics(tmp_path):
    changes = {
        "workload__factory": "torch_classifier:Classifier",
        "workload__config": {"hidden": 8, "norm": "batch"},
        "model__LLM__data_location": {"Workload": {"shuffle": "DontShuffle"}},
        "model__LLM__max_seq_len": 146,
        "peers__micro_batch": 4,
    }
    roots = []
    for carrier in ("in_process", "processes"):
        (folder := tmp_path / carrier).mkdir()
        run_file, root = a_run(folder, **changes, runtime__carrier=carrier)
        tiny.make(run_file, root, "download", "convert", "train")
        roots.append(root)
    last = Transcript(root / "data/trained/transcript").snapshots[-1]
    for name in ("rounds.jsonl", f"snapshots/{last:05}/state.json"):
        one, other = ((each / "data/trained/transcript" / name).read_bytes() for each in roots)
        assert one == other
    tiny.make(run_file, root, "witness", "export", "evaluate")
    assert verdict_of(root)["accepted"] and verdict_of(root)["not_comparable"] is None
    measured, trained = (read_json(root / f"metrics/{name}.json") for name in ("evaluate", "train"))
    assert measured["held_out_loss"] == pytest.approx(trained["held_out_loss"], rel=1e-6)


OPTIMIZERS = {"DiLoCo": tiny.DILOCO_IN_4_BITS, "SparseLoCo": tiny.SPARSELOCO}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_liar_among_peers_with_local_steps_is_named_and_its_bundle_confirms_it(
    optimizer, tmp_path
):
    run_file, root = a_run(
        tmp_path,
        model__LLM__optimizer=OPTIMIZERS[optimizer],
        faults__schedule=[{"kind": "sign_flip", "peer": 1, "rounds": [4, 5]}],
    )
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    found = verdict_of(root)["findings"]
    assert {finding["peer"] for finding in found} == {1}
    bundle = root / "data/verdict" / found[0]["bundle"]
    consents = "--worker-python", sys.executable
    done = tiny.python("-m", "pipeline", "replay", bundle, *consents, cwd=tmp_path)
    assert "1 of 1 findings confirmed, compared bit for bit" in done.stdout, done


# ---- A worker that fails ----


def failing(monkeypatch, fails) -> None:
    """Have calls of `Worker.gradient` fail where fails(number of the call) is true."""
    gradient, calls = Worker.gradient, iter(range(10_000))

    def maybe(self, params, rows_NW, seed):
        if fails(next(calls)):
            raise WorkerError("workload w: gradient: found its end with signal SIGKILL")
        return gradient(self, params, rows_NW, seed)

    monkeypatch.setattr(Worker, "gradient", maybe)


def test_a_peer_whose_worker_fails_is_lost_comes_back_and_nobody_is_accused(tmp_path, monkeypatch):
    run_file, root = a_run(tmp_path, config__min_clients=1)
    failing(monkeypatch, lambda call: call == 5)  # after the self-test's two
    printed = tiny.make(run_file, root, "download", "convert", "train")
    monkeypatch.undo()
    assert "is lost: workload w: gradient: found its end with signal SIGKILL" in printed
    rounds = Transcript(root / "data/trained/transcript").rounds
    assert [entry.evidence.silent for entry in rounds].count(()) < len(rounds)
    assert not rounds[-1].evidence.silent
    tiny.make(run_file, root, "witness")
    assert verdict_of(root)["accepted"]


def test_a_worker_that_fails_all_peers_ends_the_training_in_one_line(tmp_path, monkeypatch):
    run_file, root = a_run(tmp_path)
    failing(monkeypatch, lambda call: call >= 6)
    with pytest.raises(WorkerError, match="found its end with signal SIGKILL"):
        tiny.make(run_file, root, "download", "convert", "train")


@pytest.mark.parametrize("carrier", ["in_process", "processes"])
def test_a_class_for_burn_p2p_is_trained_on_its_own_files_and_audited(carrier, tmp_path):
    draw, shards = np.random.default_rng(0), tmp_path / "shards"
    patterns = draw.standard_normal((10, 12, 12))
    for number in range(8):
        y = draw.integers(0, 10, 40)
        x = (patterns[y] + draw.standard_normal((40, 12, 12))).astype(np.float32)
        shards.mkdir(exist_ok=True)
        save_file({"x": x, "y": y}, shards / f"{number:05}.bin")
    run_file, root = a_run(
        tmp_path,
        workload={
            "factory": "burn_class:Workload",
            "config": {"learning_rate": 0.05},
            "inner": "worker",
        },
        model__LLM__optimizer=OWN_STEPS,
        model__LLM__data_location={"Files": {"path": str(shards), "shuffle": "DontShuffle"}},
        model__LLM__max_seq_len=8,
        peers__passes=3,
        runtime__carrier=carrier,
        runtime__worker_python=sys.executable,  # its threads are of its start, as those of peers'
    )
    tiny.make(run_file, root)
    assert verdict_of(root)["accepted"] and verdict_of(root)["not_comparable"] is None
    rounds = Transcript(root / "data/trained/transcript").rounds
    assert rounds[-1].loss < 0.5 * rounds[0].loss
    exported = load_file(root / "data/export/params.safetensors")
    assert read_json(root / "metrics/evaluate.json")["workload"]["norm"] == pytest.approx(
        float(np.linalg.norm(exported["weight"])), rel=1e-5
    )


# ---- What is refused, and what is told ----


def test_check_tells_what_travels_and_on_what_it_computes(tmp_path):
    run_file, _ = a_run(tmp_path, workload__exclude=["head.*"])
    rows = {row.name: row.text for row in preflight.rows(runfile.load(run_file))}
    assert "embed.weight [64, 8]" in rows["travels"] and "head.weight" not in rows["travels"]
    assert "head.bias, head.weight" in rows["excluded"] and rows["torch"] == torch.__version__


def test_check_takes_a_loss_of_the_runs_own_data_alone(finished, tmp_path, monkeypatch):
    """The shards of a run with other data have tokens that this model does not know."""
    run_file, root, _ = finished
    other, _ = a_run(tmp_path, workload__config=CONFIG | {"vocab_size": 8})
    monkeypatch.chdir(root)
    for file, names in ((run_file, {"loss"}), (other, set())):
        rows = [*Preflight(runfile.load(file), file, root).rows()]
        assert {row.name for row in rows} & {"loss"} == names
        assert not [row for row in rows if row.name == "model" and row.mark is Mark.FAILS]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload__exclude": ["*"]}, "gradient|tensors"),
        ({"workload__exclude": ["heads.*"]}, r"workload.exclude has 'heads\.\*'.*head.bias"),
        ({"workload__include": ["*", "wte.*"]}, r"workload.include has 'wte\.\*'.*embed.weight"),
        ({"workload__config": {"vocab_size": 8}}, "KeyError"),
        ({"workload__factory": "nowhere:Model"}, "workloads/nowhere.py"),
        ({"workload__factory": "torch_language_model:Nothing"}, "Nothing"),
        ({"runtime__worker_python": "/nowhere/python"}, "/nowhere/python: No such file"),
    ],
)
def test_what_cannot_run_is_refused_by_check_in_one_line(changes, message, tmp_path):
    run_file, _ = a_run(tmp_path, **changes)
    with pytest.raises(LockstepError, match=message) as error:
        list(preflight.rows(runfile.load(run_file)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model__LLM__architecture": "HfLlama"}, "model.LLM.architecture"),
        ({"model__LLM__checkpoint": {"Init": {"config": {}, "seed": 0}}}, "model.LLM.checkpoint"),
        ({"peers__layout": "vmap"}, "peers.layout"),
        ({"peers__precision": "bfloat16"}, "peers.precision"),
        ({"workload__factory": ""}, "workload.factory"),
        ({"workload__factory": "no colon"}, "workload.factory"),
        ({"workload__inner": "command"}, "workload is a table"),
        ({"workload__inner": "worker"}, "model.LLM.optimizer"),
        ({"workload__include": [" "]}, "workload.include"),
        ({"model__LLM__optimizer": "Workload"}, "model.LLM.optimizer"),
        ({"evaluate__every": 2}, "evaluate.every"),
        ({"evaluate__tasks": ["arc_easy"]}, "evaluate.tasks"),
        ({"export__every_epoch": True}, "export.every_epoch"),
    ],
)
def test_a_run_file_that_does_not_fit_a_workload_is_refused_by_its_key(changes, key, tmp_path):
    run_file, _ = a_run(tmp_path, **changes)
    with refused(key):
        runfile.load(run_file)


def test_other_frozen_tensors_than_the_run_began_with_are_refused(finished):
    run_file, root, _ = finished
    told = json.loads((root / "data/init/workload.json").read_text())
    expected = description.Description.model_validate(
        told | {"frozen_sha256": "0" * 64}, strict=False
    )
    worker = Worker(
        runfile.load(run_file), {"kind": "tokens", "columns": ["inputs"], "length": 16}, expected
    )
    with pytest.raises(WorkerError, match="frozen_sha256 is .*, expected '0000"):
        worker.describe()


@pytest.mark.parametrize("name", ["w", "w.x.y", "a.b.c"])
def test_a_tensor_within_another_or_twice_is_refused(name, finished):
    _, root, _ = finished
    told = json.loads((root / "data/init/workload.json").read_text())
    tensors = [{"name": n, "shape": [1], "dtype": "torch.float32"} for n in ("w", "a.b", name)]
    with pytest.raises(LockstepError, match=rf"tensors is .*, expected .*'{name}'"):
        validate(description.Description, told | {"tensors": tensors}, "workload.json")


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {"kind": "tokens", "columns": ["inputs"], "length": 17},
        {"kind": "files", "folder": "/etc"},
        {"kind": "files", "folder": "files"},
        {"kind": "pickles"},
    ],
)
def test_rows_that_a_stranger_describes_as_others_are_one_line(rows, finished):
    run_file, root, _ = finished
    header = Transcript(root / "data/trained/transcript").header
    run = runfile.load(run_file)
    SUBJECT.check_model(run, header.model, "header.json")
    with refused("header.json: "):
        SUBJECT.check_model(run, header.model | {"rows": rows}, "header.json")
