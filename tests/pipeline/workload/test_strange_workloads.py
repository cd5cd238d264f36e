"""A workload that does something else than it should: one line, a lost peer, and nothing else."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.stage.artifacts import read_json
from pipeline.transcript.transcript import Transcript
from pipeline.workload import description, inner_loop, worker_process
from pipeline.workload.inner_loop import Job
from pipeline.workload.worker import Worker
from pipeline.workload.worker_process import WorkerCommand, WorkerError, WorkerProcess
from tests import tiny
from tests.pipeline.workload.test_training import verdict_of

ROWS = {"kind": "tokens", "columns": ["inputs"], "length": 16}
ROW = np.arange(32, dtype=np.int32).reshape(2, 16)
INNER = {"DiLoCo": {**tiny.DILOCO["DiLoCo"], "inner": "Workload"}}
KEPT = {**INNER["DiLoCo"], "quantize": "sign", "quantize_block": 256, "error_feedback": 0.9}


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch) -> Path:
    """A folder workloads/ of the test's own."""
    folder = tmp_path / "workloads"
    folder.mkdir()
    shutil.copyfile(Path(__file__).with_name("strange.py"), folder / "strange.py")
    monkeypatch.setattr("pipeline.workload.description.SOURCE", folder)
    monkeypatch.setattr("pipeline.workload.worker.SOURCE", folder)
    return folder


def document(folder: Path, **changes):
    given = {
        "workload__factory": "strange:Pull",
        "model__LLM__architecture": "HfAuto",
        "model__LLM__checkpoint": "Ephemeral",
    }
    return tiny.run_document(tiny.write_data(folder / "tokens"), **given | changes)


def run_of(folder: Path, **changes) -> runfile.Run:
    return runfile.parse(document(folder, **changes).unwrap(), "run.toml")


def worker(folder: Path, wrong=None, **changes) -> Worker:
    config = {"wrong": wrong} if wrong else {}
    return Worker(run_of(folder, workload__config=config, **changes), ROWS)


def inner(folder: Path, wrong: str = "", **changes) -> Worker:
    given = {"workload__factory": "strange:Inner", "workload__inner": "worker"}
    given |= {"model__LLM__optimizer": INNER, "workload__config": {"wrong": wrong}}
    return Worker(run_of(folder, **given | changes), ROWS)


def job(**changes) -> Job:
    given = {"params": {"w": np.zeros(3, np.float32)}, "lots": [ROW, ROW], "rates": [0.1, 0.1]}
    return Job(**given | {"state": inner_loop.NO_STATE, "name": "j", "seed": 1} | changes)


# ---- What is right ----


def test_a_class_of_three_functions_and_numpy_gives_losses_and_gradients(tmp_path):
    one = worker(tmp_path)
    params = one.init()
    np.testing.assert_array_equal(params["w"], [0, 1, 2])
    loss, grads = one.gradient(params, ROW, seed=0)
    np.testing.assert_allclose(grads["w"], params["w"] - ROW[:, :3].mean(0))
    assert one.measure(params, ROW).mean() == pytest.approx(loss)
    assert one.evaluate(params, "held_out") == {"norm": 3.0, "split": "held_out"}
    assert one.describe().integers == ("n",)
    one.close()


def test_an_inner_loop_goes_on_from_the_state_that_it_left(tmp_path):
    one = inner(tmp_path)
    first = inner_loop.take(one, job())
    assert first.state.tobytes() == b"text/plain\x002"
    again = inner_loop.take(one, job())
    second = inner_loop.take(one, job(state=first.state))
    np.testing.assert_array_equal(first.params["w"], again.params["w"])
    assert second.state.tobytes() == b"text/plain\x004"
    assert not np.array_equal(second.params["w"], first.params["w"])
    assert one.evaluate(first.params, "train")["sum"] == pytest.approx(first.params["w"].sum())
    one.close()


def test_a_run_by_inner_loops_is_trained_audited_and_exported(tmp_path):
    run_file, root = tmp_path / "run.toml", tmp_path / "root"
    given = {"workload__factory": "strange:Inner", "workload__inner": "worker"}
    tiny.write_run(run_file, document(tmp_path, model__LLM__optimizer={"DiLoCo": KEPT}, **given))
    tiny.make(run_file, root)
    assert verdict_of(root)["accepted"] and verdict_of(root)["method"] == "bitwise"
    snapshot = Transcript(root / "data/trained/transcript").folder / "snapshots/00006"
    assert b"text/plain" in (snapshot / "own-000.safetensors").read_bytes()
    assert read_json(root / "metrics/evaluate.json")["workload"]["sum"]


COMMAND = """
import json, os, sys
import numpy as np
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
assert os.environ["BURN_P2P_DILOCO_JOB_MANIFEST"] == sys.argv[1]
assert job["protocol_version"] == 1 and job["require_exact_steps"]
base, out = Path(job["base_parameter_pack_path"]), Path(job["output_parameter_pack_path"])
out.mkdir()
manifest = json.loads((base / "manifest.json").read_text())
del manifest["values_sha256"]
(np.fromfile(base / "values.f32le", "<f4") + 1).tofile(out / "values.f32le")
(out / "manifest.json").write_text(json.dumps(manifest))
{wrong}
result = {{"steps_completed": job["num_inner_steps"], "metrics": {{"loss": 1.5}}}}
Path(sys.argv[2]).write_text(json.dumps(result))
"""


def by_command(folder: Path, wrong: str = "", seconds: float = 20.0) -> Worker:
    script = folder / "steps.py"
    script.write_text(COMMAND.format(wrong=wrong))
    command = [sys.executable, str(script), "{job_manifest}", "{result_manifest}"]
    given = {"workload__command": command, "workload__command_seconds": seconds}
    return inner(folder, workload__inner="command", **given)


def test_a_command_takes_the_local_steps(tmp_path):
    one = by_command(tmp_path)
    taken = inner_loop.take(one, job())
    np.testing.assert_array_equal(taken.params["w"], [1, 1, 1])
    assert taken.loss == 1.5 and taken.state.tobytes() == b"\0"
    one.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sys.exit('no memory')", "found exit status 1, expected 0: no memory"),
        ("import time; time.sleep(100)", "still running after 1 seconds"),
        ("sys.argv[2] = '/dev/null'", "result.json: No such file"),
        ("job['num_inner_steps'] = 1", "steps_completed is 1, expected 2"),
    ],
)
def test_a_command_that_fails_is_one_line(wrong, message, tmp_path):
    one = by_command(tmp_path, wrong, seconds=1.0 if "sleep" in wrong else 20.0)
    with pytest.raises(WorkerError, match=message) as error:
        inner_loop.take(one, job())
    assert "\n" not in str(error.value) and str(error.value).startswith("workload strange:Inner: ")


# ---- What is wrong ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"factory": "raise"}, r"hello: RuntimeError: factory: a secret and a second line$"),
        ({"factory": "exit"}, r"hello: found its end with exit status 3, expected an answer"),
        ({"factory": "hang"}, r"hello: found no answer after .* seconds, expected one in time"),
        ({"init": "raise"}, r"begin: RuntimeError: init: a secret"),
        ({"gradient": "exit"}, r"gradient: found its end with exit status 3, expected an answer"),
        ({"gradient": "kill"}, r"gradient: found its end with signal SIGKILL"),
        ({"gradient": "hang"}, r"gradient: found no answer after 3 seconds, expected one in time"),
        ({"gradient": "flood"}, r"log: found more than 1,000,000 bytes of output, expected less"),
        ({"gradient": "missing"}, r"gradient: ValueError: gradients: missing \['w'\]"),
        ({"gradient": "extra"}, r"gradient: ValueError: gradients: .* not expected \['v'\]"),
        ({"gradient": "shape"}, r"gradient: ValueError: gradient 'w': shape \(2,\)"),
        ({"measure": "few"}, r"measure: ValueError: losses of shape \(1,\)"),
    ],
)
def test_each_fault_of_a_worker_is_one_line_with_worker_and_method(
    wrong, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_process, "MOST_LOG", 1_000_000)
    times = {"runtime__answer_seconds": 3.0, "runtime__worker_start_seconds": 5.0}
    one = worker(tmp_path, wrong, **times)
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
    ("wrong", "message"),
    [
        ("few", "completed 1 steps; 2 expected|took 1 steps; 2 expected"),
        ("nan", "value 0 is nan, expected finite numbers"),
        ("anothers", "layout_hash is 'another', expected 'torch-layout-"),
        ("outside", "hostname"),
        ("silent", r"metrics are \[\], expected a number loss or train_loss"),
    ],
)
def test_an_inner_loop_that_leaves_something_else_is_one_line(wrong, message, tmp_path):
    one = inner(tmp_path, wrong)
    with pytest.raises(WorkerError, match=message) as error:
        inner_loop.take(one, job())
    assert "\n" not in str(error.value) and "strange:Inner: run_inner_loop" in str(error.value)
    one.close()


def test_what_a_worker_started_ends_with_it(tmp_path):
    one = worker(tmp_path, {"gradient": "fork"})
    one.gradient(one.init(), ROW, seed=0)
    session = one._begun.process._process.pid
    assert len(members(session)) == 2
    one.close()
    deadline = time.monotonic() + 5
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not members(session)


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(state[3]) == session and state[0] != "Z":
            found.append(int(folder.name))
    return found


def test_a_worker_starts_again_after_it_failed(tmp_path):
    one = worker(tmp_path)
    params = one.init()
    os.kill(one._begun.process._process.pid, 9)
    with pytest.raises(WorkerError, match="signal SIGKILL"):
        one.gradient(params, ROW, seed=0)
    assert one.gradient(params, ROW, seed=0)[0] > 0
    one.close()


def test_a_worker_inherits_no_secret_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = WorkerCommand(sys.executable, "m", "a:b", {}, env={"MINE": "1"})
    environment = command.environment()
    assert environment["MINE"] == "1" and environment["OMP_NUM_THREADS"] == "1"
    assert not [name for name in environment if "TOKEN" in name or "SECRET" in name]


STRANGER = """
import argparse, json, socket, struct, sys
p = argparse.ArgumentParser()
for name in ("factory", "config-json", "connect-host", "connect-port"):
    p.add_argument("--" + name)
a = p.parse_args()
s = socket.create_connection((a.connect_host, int(a.connect_port)))
def request():
    (n,) = struct.unpack(">Q", s.recv(8)); return json.loads(s.recv(n))
def send(body):
    s.sendall(struct.pack(">Q", len(body)) + body)
r = request()
HELLO = {"protocol_version": 2, "workload_name": "x", "capabilities": []}
OK = {"id": r["id"], "ok": True}
"""


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("send(json.dumps({**OK, 'id': 99, 'result': HELLO}).encode())", "to another request"),
        ("send(b'nonsense')", "an answer that is no JSON"),
        ("send(b'{\"id\": 1, \"ok\": true, \"result\": {\"x\": NaN}}')", "NaN, which JSON has not"),
        ("send(json.dumps({**OK, 'result': []}).encode())", "expected a table"),
        ("s.sendall(struct.pack('>Q', 2**40))", "an answer of 1,099,511,627,776 bytes"),
        ("s.sendall(b'123'); sys.exit(1)", "its end with exit status 1"),
        ("HELLO['protocol_version'] = 3; send(json.dumps({**OK, 'result': HELLO}).encode())",
         "found version 3, expected 1 or 2"),
        ("send(json.dumps({**OK, 'ok': False, 'error': 'why\\nline 3'}).encode())", "hello: why$"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_one_line(says, message, source):
    (source / "stranger.py").write_text(STRANGER + says + "\ns.recv(1)\n")
    command = WorkerCommand(sys.executable, "stranger", "a:b", {}, (source,), start_seconds=5.0)
    with pytest.raises(LockstepError, match=message) as error:
        WorkerProcess.start(command, source.parent / "worker")
    assert "\n" not in str(error.value)


def test_somebody_else_who_connects_first_is_not_the_worker(tmp_path):
    """Another process of this machine finds the port, and is let go of."""
    (tmp_path / "workloads" / "late.py").write_text(
        "import subprocess, sys, time\n" + STRANGER.replace(
            "s = socket", "subprocess.run(['true']); time.sleep(0.5)\ns = socket"
        ) + "send(json.dumps({**OK, 'result': HELLO}).encode())\ns.recv(1)\n"
    )  # fmt: skip
    command = WorkerCommand(
        sys.executable, "late", "a:b", {}, (tmp_path / "workloads",), start_seconds=5.0
    )
    spawn = worker_process._spawn
    intruders = []

    def with_an_intruder(command, folder, port):
        process = spawn(command, folder, port)
        text = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.recv(1)"
        intruders.append(subprocess.Popen([sys.executable, "-c", text], start_new_session=True))
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "_spawn", with_an_intruder)
        found = WorkerProcess.start(command, tmp_path / "worker")
    assert found.hello.workload_name == "x"
    found.kill()
    assert intruders[0].wait(5) == 0  # its connection was closed


# ---- Bits that differ from one time to the next ----

NOISY = {"wrong": {"gradient": "noise"}, "noise": 0.02, "size": 256}
VALUES = {  # which show how far a gradient scatters
    "Distro": {
        "compression_decay": 0.9,
        "compression_topk": 4,
        "compression_chunk": 64,
        "quantize_1bit": False,
    }
}


def noisy(folder: Path, **changes) -> tuple[Path, Path]:
    run_file, root = folder / "run.toml", folder / "root"
    given = {"workload__config": NOISY, "model__LLM__optimizer": VALUES} | changes
    tiny.write_run(run_file, document(folder, **given))
    return run_file, root


def test_honest_repeats_calibrate_the_tolerance_and_the_verdict_says_so(tmp_path):
    run_file, root = noisy(tmp_path)
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    verdict = verdict_of(root)
    assert verdict["accepted"] and verdict["method"] == "tolerance"
    assert verdict["repeats"] > 0
    assert verdict["tolerance"] == pytest.approx(max(0.05, min(0.5, 4 * verdict["repeats"])))
    assert "honest repeats here were up to" in (root / "data/verdict/verdict.txt").read_text()


def test_a_liar_among_peers_whose_bits_scatter_is_named_all_the_same(tmp_path):
    lie = [{"kind": "sign_flip", "peer": 1, "rounds": [4, 5]}]
    run_file, root = noisy(tmp_path, faults__schedule=lie)
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    assert {finding["peer"] for finding in verdict_of(root)["findings"]} == {1}


def test_messages_that_are_not_kept_and_whose_bits_scatter_are_refused(tmp_path):
    run_file, root = noisy(tmp_path, model__LLM__optimizer=tiny.ADAMW)
    with pytest.raises(LockstepError, match="differs in its bits, .* expected quantize") as error:
        tiny.make(run_file, root, "download", "convert", "train")
    assert "\n" not in str(error.value)


def test_code_hash_is_of_table_and_all_files(tmp_path, source):
    run = run_of(tmp_path)
    first = description.code_hash(run)
    assert description.code_hash(run_of(tmp_path, workload__seed=1)) != first
    (source / "other.py").write_text("x = 1\n")
    assert description.code_hash(run) != first
