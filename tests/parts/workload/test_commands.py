"""What each command does with a workload, as the table of docs/reference/workloads.md says."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from lockstep.files import read_json, write_json
from lockstep.transcript.transcript import Transcript
from parts.publication import publish, readers_checks
from parts.publication.fetch import Limits
from parts.publication.layout import ReaderAsks
from parts.workload import worker
from parts.workload.process.worker_process import WorkerError
from pipeline import runfile
from pipeline.audit.unchecked_bundle import WorkerOfReader
from pipeline.monitor import tracker, training
from pipeline.runfile import Network
from pipeline.stage.keys import PROJECT, Keys
from pipeline.weights import upload
from tests import tiny
from tests.errors import refused
from tests.parts.workload.finished_run import CONFIG, FACTORY, OWN_STEPS, ROUNDS, a_run
from tests.parts.workload.test_training import failing
from tests.parts.workload.worker_host import WORKLOADS

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_workers")]
LIMITS = Limits(1, Network(attempts=1, stall_seconds=1))


@pytest.fixture(scope="module")
def published(finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "folder"
    publish.write(folder, finished.run_file, finished.root, 2, None)
    return folder


def lockstep(*words: object) -> str:
    """What a command prints; its errors are raised."""
    return tiny.invoked(*words).output


def of_run(finished, command: str) -> str:
    return lockstep(command, "--run", finished.run_file, "--root", finished.root)


OF_READER = WorkerOfReader(worker_python=sys.executable)  # who consents to run the workload


def verify(folder: Path):
    root = folder.parent / "reader"
    with tiny.like_a_process():
        return readers_checks.verify_publication(str(folder), root, LIMITS, ReaderAsks(), OF_READER)


# ---- Stages ----


def test_convert_asks_the_workload_for_its_params(finished):
    init = finished.root / "data/init"
    assert not (init / "hf").exists()
    told = read_json(init / "workload.json")
    assert (told["factory"], told["code"]) == (FACTORY, finished.code)
    assert read_json(init / "source.json")["factory"] == FACTORY


def test_evaluate_has_a_loss_and_says_that_a_workload_has_no_tasks(finished):
    evaluated = read_json(finished.root / "data/evaluate/evaluate.json")
    assert evaluated["held_out_loss"] > 0 and evaluated["text"] is None
    assert any("tasks" in note and "language model" in note for note in evaluated["notes"])


def test_trackers_have_the_loss_of_a_workload_and_no_perplexity(finished):
    run = runfile.load(finished.run_file)
    transcript = Transcript(finished.root / "data/trained/transcript")
    assert tracker._name(run, transcript.header).startswith("distro-1.5k-")
    for factory, names in (
        (FACTORY, {"loss/held_out"}),
        ("", {"loss/held_out", "loss/perplexity"}),
    ):
        run = run.model_copy(
            update={"workload": run.workload.model_copy(update={"factory": factory})}
        )
        told = tracker.Tracker(run, finished.root, 0, lambda: [])
        assert told._measured(1.0).keys() == names


def test_a_training_in_progress_is_shown(finished, tmp_path, monkeypatch):
    root = shutil.copytree(finished.root, tmp_path / "root")
    run_file, _ = a_run(tmp_path, peers__seed=7, **finished.same_run)
    with monkeypatch.context() as patch, pytest.raises(WorkerError):
        failing(patch, lambda call: call >= 8)
        tiny.make(run_file, root, "train")
    assert "held out" in lockstep("status", "--root", root)
    seen = training.in_progress(root)[0]
    assert seen.status.held_out_loss is not None


def test_a_workers_command_is_what_runtime_says(tmp_path):
    given = {"worker_python": "/a/python", "worker_module": "m", "worker_path": ["/b"]}
    changes = {f"runtime__{name}": value for name, value in given.items()}
    run_file, _ = a_run(tmp_path, runtime__worker_env={"MINE": "1"}, **changes)
    command = worker._command(runfile.load(run_file))
    assert (command.python, command.module, command.factory) == ("/a/python", "m", FACTORY)
    environment = command.environment()
    *ours, workloads, theirs = environment["PYTHONPATH"].split(":")
    assert {str(PROJECT / "parts/workload/python"), str(PROJECT / "lockstep/python")} <= {*ours}
    assert workloads.endswith("/workloads")
    assert (theirs, environment["MINE"]) == ("/b", "1")


def test_train_says_what_computes(finished):
    assert f"train: workload {FACTORY} computes on cpu\n" in finished.printed
    assert "attention" not in finished.printed


# ---- A run that extends another ----


def extend(finished, folder: Path, **changes: object) -> str:
    """Train on from the finished run, in its own root; return what convert and train print."""
    key = Keys(finished.run_file).key("train")
    root = folder / "root"
    if not root.exists():
        shutil.copytree(finished.root, root)
    run_file, _ = a_run(
        folder,
        model__LLM__checkpoint={"Run": key},
        **finished.same_run | {"config__total_steps": ROUNDS + 3} | changes,
    )
    return tiny.make(run_file, root, "download", "convert", "train")


def test_a_run_goes_on_from_another_by_its_key(finished, tmp_path):
    printed = extend(finished, tmp_path)
    assert "warning: workload" not in printed
    assert Transcript(tmp_path / "root/data/trained/transcript").rounds[0].round.step == ROUNDS + 1


def test_a_run_that_goes_on_with_other_code_or_settings_says_so(finished, tmp_path):
    printed = extend(finished, tmp_path, workload__config=CONFIG | {"dropout": 0.2})
    assert f"which this one extends, had {finished.code[:12]}" in printed


def test_a_run_that_goes_on_with_other_tensors_is_refused(finished, tmp_path):
    with refused("tensors of workload", "expected the same"):
        extend(finished, tmp_path, workload__config=CONFIG | {"hidden_size": 4})


def test_a_model_of_models_does_not_go_on_from_a_workload(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "root")
    key = Keys(finished.run_file).key("train")
    run_file, root = tiny.start(tmp_path, model__LLM__checkpoint={"Run": key})
    with refused("model.LLM.checkpoint.Run", key):
        tiny.make(run_file, root, "convert")


# ---- Commands ----


def test_plan_says_what_a_workload_takes_but_for_its_own_memory(finished):
    said = of_run(finished, "plan")
    assert "params         6.1 kB" in said
    assert "memory         not known: a workload computes in a process of its own" in said
    assert "stage train    has its result" in said


def test_plan_before_convert_says_what_makes_the_description(tmp_path):
    run_file, root = a_run(tmp_path)
    with refused(root / "data/init/workload.json", "lockstep convert"):
        lockstep("plan", "--no-memory", "--run", run_file, "--root", root)


def test_generate_of_an_export_that_is_no_folder_of_hugging_face_is_one_line(finished):
    with refused(finished.root / "data/export/config.json"):
        lockstep("generate", finished.root / "data/export", "a prompt")


def test_summary_has_the_loss_as_the_workload_has_it(finished):
    said = of_run(finished, "summary")
    assert "as the workload has it" in said and "bits per byte  not measured" in said


def test_push_names_what_the_params_are_and_no_checkpoint(finished, monkeypatch, capsys):
    pushed = {}
    monkeypatch.setattr(upload, "push", lambda to, files, **_: pushed.update(files) or to)
    publish.push(finished.run_file, finished.root, ["me/there"], private=True)
    assert pushed.keys() == {"README.md", "params.safetensors", "workload.json"}
    said = capsys.readouterr().out
    assert "workload.json" in said
    assert "checkpoint =" not in said


# ---- Publications ----


def test_a_publication_of_a_workload_verifies(published, finished):
    names = {path.name for path in published.iterdir() if path.is_file()}
    assert names == {"README.md", "params.safetensors", "workload.json"}
    verified = verify(published)
    assert verified.bitwise and verified.claim("held_out").values["sequences"] == 4
    assert verified.claim("start").kind == verified.claim("weights").kind == "proven"
    assert "sent, lead from there to the weights, bit for bit" in verified.text
    assert verified.claim("code").values == {"sha256": finished.code}
    assert f"what code {finished.code[:12]} of workloads/ means" in verified.text


def test_a_publication_of_rounded_params_verifies(finished, tmp_path):
    root = shutil.copytree(finished.root, tmp_path / "root")
    run_file, _ = a_run(tmp_path, export__dtype="bfloat16", **finished.same_run)
    tiny.make(run_file, root)
    publish.write(tmp_path / "folder", run_file, root, 1, None)
    assert verify(tmp_path / "folder").bitwise


@pytest.mark.parametrize("file", ["workload.json", "params.safetensors"])
def test_a_publication_whose_export_was_changed_is_refused(file, published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "folder")
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    with refused(file):
        verify(folder)


def test_a_publication_is_not_verified_with_other_code(published, tmp_path, monkeypatch):
    other = shutil.copytree(WORKLOADS, tmp_path / "workloads")
    (other / "torch_language_model.py").open("a").write("# another\n")
    monkeypatch.setattr("parts.workload.description.SOURCE", other)
    with refused("nothing was audited"):
        verify(published)


def test_no_workload_is_run_before_its_reader_says_with_which_python(published):
    done = json.loads(lockstep("verify", published, "--json"))
    assert done["outcome"] == "cannot be asked" and not done["bitwise"]
    assert f'workload.factory is "{FACTORY}"' in done["reason"]
    assert "--worker-python" in done["reason"]


def test_a_function_that_a_workloads_file_imports_is_none_of_its_own(published, tmp_path):
    folder, canary = shutil.copytree(published, tmp_path / "folder"), tmp_path / "ran"
    run = read_json(folder / "proof/run.json")
    ran = "torch_classifier:torch._strobelight.cli_function_profiler.subprocess.run"
    run["workload"] |= {"factory": ran, "config": {"/bin/touch": 0, str(canary): 0}}
    write_json(folder / "proof/run.json", run)
    with refused('workload.factory is "torch_classifier:'):
        lockstep("replay", folder / "proof", "--worker-python", sys.executable)
    assert not canary.exists()


def test_a_strangers_command_is_not_run(published, tmp_path, monkeypatch):
    folder = shutil.copytree(published, tmp_path / "folder")
    run = read_json(folder / "proof/run.json")
    run["workload"] |= {"inner": "command", "command": ["touch", str(tmp_path / "ran")]}
    run["model"]["LLM"]["optimizer"] = OWN_STEPS
    write_json(folder / "proof/run.json", run)
    with refused("workload.factory"):
        lockstep("replay", folder / "proof")
    with refused("workload.command", "touch"):
        lockstep("replay", folder / "proof", "--worker-python", sys.executable)
    assert not (tmp_path / "ran").exists()


COMMAND = {"workload__inner": "command", "workload__command": ["train"]}
FILES = {"Files": {"path": "/data", "shuffle": "DontShuffle"}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (COMMAND | {"model__LLM__optimizer": OWN_STEPS}, "workload.inner is 'command', expected"),
        ({"model__LLM__data_location": FILES}, "model.LLM.data_location.Files: rows are names of"),
    ],
)
def test_what_nobody_could_repeat_is_not_published(changes, named, tmp_path):
    run_file, root = a_run(tmp_path, **changes)
    with refused(named):
        lockstep("publish", tmp_path / "to", "--run", run_file, "--root", root)


@pytest.mark.parametrize(
    ("program", "module", "message"),
    [
        ("/nowhere/python", "lockstep_worker.worker", "/nowhere/python: No such file or directory"),
        (sys.executable, "no_such_worker", "No module named no_such_worker"),
    ],
)
def test_verify_takes_the_readers_python(program, module, message, published, monkeypatch):
    monkeypatch.setattr(tiny, "_made", {})  # programs have a worker
    asked = ("--worker-python", program, "--worker-module", module)
    done = json.loads(lockstep("verify", published, "--json", *asked))
    assert done["outcome"] == "cannot be asked" and message in done["reason"]


def test_try_python_trains_a_model_that_lockstep_does_not_have(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": tiny.VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 1}
    given = transformers.GPT2Config(**config, n_head=1, bos_token_id=0, eos_token_id=0)
    model, data = tmp_path / "gpt2", tiny.write_data(tmp_path / "tokens")
    transformers.GPT2LMHeadModel(given).save_pretrained(model)
    monkeypatch.chdir(tmp_path)
    brief = "--sequence-length 16 --total-steps 2 --warmup-steps 1 --total-batch 2 --micro-batch 1"
    flags = ["--model", str(model), "--data-path", str(data), "--python", "--save-path", "saved"]
    assert tiny.invoked("try", *flags, *brief.split(), "--distro").exit_code == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained("saved")
    assert type(trained) is transformers.GPT2LMHeadModel
