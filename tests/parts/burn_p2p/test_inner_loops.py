"""Inner loops by the worker and by a command: they go on, and what is wrong is one line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from parts.workload import inner_steps
from parts.workload.process.messages import WorkerError
from parts.workload.worker import Worker
from tests.errors import refused
from tests.parts.workload.test_strange_workloads import inner, job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("source")]


def test_an_inner_loop_goes_on_from_the_state_that_it_left(tmp_path):
    one = inner(tmp_path)
    first = inner_steps.take(one, job())
    assert first.state.tobytes() == b"text/plain\x002"
    again = inner_steps.take(one, job())
    second = inner_steps.take(one, job(state=first.state))
    np.testing.assert_array_equal(first.params["w"], again.params["w"])
    assert second.state.tobytes() == b"text/plain\x004"
    assert not np.array_equal(second.params["w"], first.params["w"])
    assert one.evaluate(first.params, "train")["sum"] == pytest.approx(first.params["w"].sum())
    one.close()


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
    taken = inner_steps.take(one, job())
    np.testing.assert_array_equal(taken.params["w"], [1, 1, 1])
    assert taken.loss == 1.5 and taken.state.tobytes() == b"\0"
    one.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sys.exit('no memory')", "exited with status 1, expected status 0: no memory"),
        ("import time; time.sleep(100)", "still running after 1 seconds"),
        ("sys.argv[2] = '/dev/null'", "result.json: No such file"),
        ("job['num_inner_steps'] = 1", "steps_completed is 1, expected 2"),
    ],
)
def test_a_command_that_fails_is_one_line(wrong, message, tmp_path):
    one = by_command(tmp_path, wrong, seconds=1.0 if "sleep" in wrong else 20.0)
    with refused("workload strange:Inner: ", message, error=WorkerError):
        inner_steps.take(one, job())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("few", "run_inner_loop took 1 steps; 2 expected"),
        ("nan", "value 0 is nan, expected finite numbers"),
        ("anothers", "layout_hash is 'another', expected 'torch-layout-"),
        ("outside", "hostname"),
        ("silent", "metrics are [], expected a number loss or train_loss"),
    ],
)
def test_an_inner_loop_that_leaves_something_else_is_one_line(wrong, message, tmp_path):
    one = inner(tmp_path, wrong)
    with refused("workload strange:Inner: run_inner_loop", message, error=WorkerError):
        inner_steps.take(one, job())
    one.close()
