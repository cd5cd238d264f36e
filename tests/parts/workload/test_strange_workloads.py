"""A workload that does something else than it should: one line, a lost peer, and nothing else."""

import os
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from parts.workload import description, inner_steps
from parts.workload.inner_steps import Job
from parts.workload.process.messages import WorkerError
from parts.workload.worker import Worker
from pipeline import runfile, train
from pipeline.audit.replay import Replay
from pipeline.start import set_up
from tests import tiny
from tests.errors import refused
from tests.parts.workload import finished_run
from tests.parts.workload.finished_run import OWN_STEPS, verdict_of
from tests.pipeline.audit.edited.audited_run import record

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("source")]
ROWS = {"kind": "tokens", "columns": ["inputs"], "length": 16}
ROW = np.arange(32, dtype=np.int32).reshape(2, 16)


def start(folder: Path, **changes) -> tuple[Path, Path]:
    given = {"workload__factory": "strange:Pull", "workload__config": {}}
    return finished_run.a_run(folder, **given | changes)


def run_of(folder: Path, **changes) -> runfile.Run:
    return runfile.load(start(folder, **changes)[0])


def worker(folder: Path, wrong=None, **changes) -> Worker:
    config = {"wrong": wrong} if wrong else {}
    return Worker(run_of(folder, workload__config=config, **changes), ROWS)


def inner(folder: Path, wrong: str = "", **changes) -> Worker:
    given = {"workload__factory": "strange:Inner", "workload__inner": "worker"}
    given |= {"model__LLM__optimizer": OWN_STEPS, "workload__config": {"wrong": wrong}}
    return Worker(run_of(folder, **given | changes), ROWS)


def job(**changes) -> Job:
    given = {"params": {"w": np.zeros(3, np.float32)}, "lots": [ROW, ROW], "rates": [0.1, 0.1]}
    return Job(**given | {"state": inner_steps.NO_STATE, "name": "j", "seed": 1} | changes)


# ---- What is right ----


@pytest.mark.parametrize("factory", ["strange:Pull", "modèle:Models.Größe"])
def test_a_class_of_three_functions_and_numpy_gives_losses_and_gradients(factory, tmp_path, source):
    (source / "modèle.py").write_text("import strange\nclass Models: Größe = strange.Pull\n")
    one = worker(tmp_path, workload__factory=factory)
    params = one.init()
    np.testing.assert_array_equal(params["w"], [0, 1, 2])
    loss, grads = one.gradient(params, ROW, seed=0)
    np.testing.assert_allclose(grads["w"], params["w"] - ROW[:, :3].mean(0))
    assert one.measure(params, ROW).mean() == pytest.approx(loss)
    assert one.evaluate(params, "held_out") == {"norm": 3.0, "split": "held_out"}
    assert one.describe().integers == ("n",)
    one.close()


def test_rows_that_are_files_reach_the_workload_as_paths_by_their_hash(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.bin").write_bytes(bytes(100 + number))
    order = {"Seeded": [7] * 32}
    location = {"Files": {"path": str(folder), "held_out_percent": 10, "shuffle": order}}
    given = {"workload__factory": "strange:Sizes", "model__LLM__max_seq_len": 8}
    run_file, root = start(tmp_path, model__LLM__data_location=location, **given)
    monkeypatch.chdir(tmp_path)  # whose data/shards is another
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    assert verdict_of(root)["accepted"]
    header = Transcript(root / "data/trained/transcript").header
    assert header.model["rows"] == {"kind": "files", "folder": "files"}
    assert read_json(root / "metrics/train.json")["loss"] > 100**2 / 2 / 2


# ---- What is wrong ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"init": "raise"}, r"begin: RuntimeError: init: a secret and a second line"),
        ({"gradient": "exit"}, "gradient: the worker exited with status 3"),
        ({"gradient": "missing"}, r"gradient: ValueError: gradients: missing \['w'\]"),
        ({"gradient": "extra"}, r"gradient: ValueError: gradients: .* not expected \['v'\]"),
        ({"gradient": "shape"}, r"gradient: ValueError: gradient 'w': shape \(2,\)"),
        ({"measure": "few"}, r"measure: ValueError: losses of shape \(1,\)"),
    ],
)
def test_each_fault_of_a_worker_is_one_line_with_worker_and_method(wrong, message, tmp_path):
    one = worker(tmp_path, wrong)
    with pytest.raises(WorkerError, match=f"^workload strange:Pull: {message}") as error:
        params = one.init()
        one.gradient(params, ROW, seed=0)
        one.measure(params, ROW)
    assert "\n" not in str(error.value)
    one.close()


def test_nan_is_told_as_nan_and_not_as_json_that_nobody_reads(tmp_path):
    one = worker(tmp_path, {"gradient": "nan"})
    loss, grads = one.gradient(one.init(), ROW, seed=0)
    assert np.isnan(loss) and np.isnan(grads["w"][1])
    one.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("workloads/notes.txt", False),
        ("workloads/strange.py", True),
        ("init/params", True),
        ("init/new", True),
    ],
)
def test_a_worker_that_writes_code_or_what_its_run_began_with_is_told_at_the_end(
    name, told, tmp_path, source
):
    (tmp_path / "init").mkdir()
    for there in ("workloads/notes.txt", "init/params"):
        (tmp_path / there).write_text("as it was")
    wrong = {"gradient": f"write {tmp_path / name}"}
    with closing(worker(tmp_path, wrong)) as first:
        expected = first.describe()
    one = worker(tmp_path, wrong)
    one.expected, one.shards = expected, tmp_path / "shards"
    one.gradient(one.init(), ROW, seed=0)
    with refused(f"{name} changed while it ran") if told else nullcontext():
        one.close()


def test_a_worker_that_died_once_answers_all_the_same_and_its_log_is_kept(tmp_path, caplog):
    one = worker(tmp_path)
    one.shards = tmp_path / "data/shards"
    one.shards.mkdir(parents=True)
    params = one.init()
    os.kill(one._session.process.group.child.pid, 9)
    assert one.gradient(params, ROW, seed=0)[0] > 0
    assert "was ended by SIGKILL" in caplog.text and "asked once more" in caplog.text
    one.close()
    assert (tmp_path / "data/logs/worker.log").is_file()


# ---- Bits that differ from one time to the next ----


FEW = {"model__LLM__optimizer__Distro__compression_topk": 1}  # values, so messages are kept


@pytest.mark.parametrize("optimizer", [FEW, {"model__LLM__optimizer": tiny.ADAMW}])
def test_where_a_step_does_not_repeat_nobody_trains_and_nobody_is_accused(
    optimizer, tmp_path, monkeypatch
):
    noisy = {"wrong": {"gradient": "noise"}, "noise": 0.0005, "size": 256}
    run_file, root = start(tmp_path, workload__config=noisy, **optimizer)
    with pytest.raises(LockstepError, match="in a fresh|after another.* repeats = false") as error:
        tiny.make(run_file, root, "download", "convert", "train")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(train, "repeats_bit_for_bit", lambda setup: True)  # as it did elsewhere
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    verdict = verdict_of(root)
    assert verdict["accepted"] and verdict["findings"] == verdict["replayed_windows"] == []
    assert "other bits when replayed twice here" in verdict["not_comparable"]

    # its author for params that do not follow from messages, whoever can repeat them
    run, data = runfile.load(run_file), root / "data"
    window = run.snapshots().windows[-1]
    record(data / "trained/transcript", window.last, lambda state: state.update(params="ab" * 32))
    setup = set_up.read(run, data / "init", data / "shards")
    with closing(setup.programs.steps.by):
        replay = Replay(setup, Transcript(data / "trained/transcript"))
        outcome = replay.window(window, range(run.peers.count), lambda: None)
    assert outcome.why is not None and outcome.peers == ()
    found = [(finding.peer, finding.kind) for finding in outcome.findings]
    assert replay.kept == (optimizer is FEW)
    assert found == ([(None, "params")] if replay.kept else [])


def test_the_code_hash_is_of_the_table_and_of_what_is_imported(tmp_path, source):
    run = run_of(tmp_path)
    first = description.code_hash(run)
    assert description.code_hash(run_of(tmp_path, workload__seed=1)) != first
    (source / "other.py").write_text("x = 1\n")
    assert description.code_hash(run) == first
    strange = (source / "strange.py").read_text()
    (source / "strange.py").write_text(f"{strange}\ndef late():\n    import other\n")
    second = description.code_hash(run)
    (source / "other.py").write_text("x = 2\n")
    assert len({first, second, description.code_hash(run)}) == 3


def test_code_that_is_imported_otherwise_is_refused(tmp_path, source):
    (source / "other.py").write_text("x = 1\n")
    with open(source / "strange.py", "a") as file:
        file.write("\n__import__('other')\n")
    with pytest.raises(WorkerError, match="hello: .* imported other.py"):
        worker(tmp_path).init()
