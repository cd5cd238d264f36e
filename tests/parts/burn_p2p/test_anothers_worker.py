"""A worker of burn_p2p's protocol that is not ours serves a whole run."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.files import read_json, sha256_file
from lockstep.transcript.trees import load_arrays
from parts.workload import inner_steps
from parts.workload.process.worker_process import WorkerError
from parts.workload.worker import Worker
from tests import tiny
from tests.parts.workload.finished_run import verdict_of
from tests.parts.workload.test_strange_workloads import ROWS, inner, job, run_of, start

pytestmark = pytest.mark.usefixtures("source", "quick_workers")
SERVED = {
    "runtime__worker_module": "bridge_worker",
    "runtime__worker_path": [str(Path(__file__).parent)],
}
QUANTIZED = {"quantize": "int8", "quantize_block": 2}
IN_8_BITS = {"DiLoCo": {**tiny.DILOCO["DiLoCo"], "inner": "Workload", **QUANTIZED}}


def test_a_run_is_trained_audited_bit_for_bit_exported_and_evaluated(tmp_path):
    given = {"workload__factory": "strange:Inner", "workload__inner": "worker", **SERVED}
    run_file, root = start(tmp_path, model__LLM__optimizer=IN_8_BITS, **given)
    tiny.make(run_file, root)
    verdict = verdict_of(root)
    assert verdict["accepted"] and verdict["not_comparable"] is None
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 4
    told = read_json(root / "data/init/workload.json")
    assert told["tensors"] == [{"name": "values", "shape": [3], "dtype": "float32"}]
    assert told["integers"] == ["n"] and told["frozen_sha256"] is None
    exported = load_arrays(root / "data/export/params.safetensors")
    metrics = read_json(root / "metrics/evaluate.json")
    assert metrics["workload"]["sum"] == pytest.approx(float(exported["values"].sum()))
    assert metrics["held_out_loss"] is None  # it has no loss of given rows


@pytest.mark.parametrize("given", [SERVED, {"workload__factory": "strange:OwnPacks"}])
def test_its_steps_are_those_of_our_worker_and_so_are_those_of_packs_of_ones_own(tmp_path, given):
    theirs, ours = inner(tmp_path, **given), inner(tmp_path)
    values = np.array([3, -1, 0.5], np.float32)
    assert theirs.init()["values"].shape == (3,)
    assert theirs.evaluate({"values": values}, "train") == {"sum": 2.5}
    one = inner_steps.take(theirs, job(params={"values": values}))
    other = inner_steps.take(ours, job(params={"w": values}))
    np.testing.assert_array_equal(one.params["values"], other.params["w"])
    assert one.loss == other.loss and one.state.tobytes() == other.state.tobytes()
    theirs.close()
    ours.close()


def test_rows_that_are_files_are_the_users_own_in_either_worker(tmp_path):
    """As burn_p2p lists micro-shards: a class written for it reads its own files."""
    (tmp_path / "files").mkdir()
    rows = []
    for number in range(2):
        np.save(tmp_path / "file.npy", np.full((2, 3), 4.0 * number, np.float32))
        name = sha256_file(tmp_path / "file.npy")
        (tmp_path / "file.npy").rename(tmp_path / "files" / name)
        rows.append(np.frombuffer(bytes.fromhex(name), "<i4")[None])
    for given, key in ((SERVED, "values"), ({}, "w")):
        one = inner(tmp_path, **given)
        one.rows, one.shards = {"kind": "files", "folder": "files"}, tmp_path
        found = inner_steps.take(one, job(params={key: np.zeros(3, np.float32)}, lots=rows))
        np.testing.assert_array_equal(found.params[key], [2, 2, 2])  # half-way to 0, then to 4
        one.close()


def test_it_has_the_runs_number_of_threads_though_no_method_of_its_says_any(tmp_path):
    one = inner(tmp_path, **SERVED, peers__threads=3)
    folder = one.ask(lambda begun: begun.process.folder)
    assert (folder / "threads").read_text() == one.environment["worker_threads"] == "3"
    one.close()


def test_gradients_are_not_asked_of_it(tmp_path):
    with pytest.raises(WorkerError, match="hello: capabilities .*, expected gradient among them"):
        Worker(run_of(tmp_path, **SERVED), ROWS).describe()
