"""A workload without parts/burn_p2p: it gives gradients, and takes no steps of its own."""

import subprocess
import sys

import numpy as np
import pytest

from parts.workload import worker
from parts.workload.process import worker_process
from parts.workload.worker import Worker
from tests.errors import refused
from tests.parts.workload.test_strange_workloads import ROW, ROWS, inner, run_of

pytestmark = pytest.mark.usefixtures("source", "quick_workers")
TORCH = """
from lockstep_worker import TorchWorkload
class Model(TorchWorkload):
    def inner_optimizer(self, model): ...
    def dataset(self, split): ...
print(*(hasattr(Model({}), name) for name in ("evaluate", "run_inner_loop")))
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Neither this process nor a worker finds that part."""
    for joint in (worker.PACKS, worker.INNER_LOOPS):
        monkeypatch.setattr(joint, "parts", list)
    kept = [place for place in worker_process.PYTHON if place.parent.name != "burn_p2p"]
    assert len(kept) < len(worker_process.PYTHON)
    monkeypatch.setattr(worker_process, "PYTHON", kept)
    return kept


def test_it_gives_gradients_and_measures(tmp_path):
    one = Worker(run_of(tmp_path), ROWS)
    params = one.init()
    loss, gradient = one.gradient(params, ROW, 0)
    assert np.isfinite(loss) and gradient.keys() == params.keys()
    assert one.measure(params, ROW).shape == (2,)
    assert "parameter_pack_export" not in one.capabilities
    one.close()


def test_a_class_of_torch_has_no_inner_loop(alone):
    environment = {"PYTHONPATH": ":".join(map(str, alone))}
    done = subprocess.run([sys.executable, "-c", TORCH], env=environment, capture_output=True)
    assert done.stdout.split() == [b"True", b"False"], done.stderr


def test_a_run_whose_workload_takes_its_own_steps_is_refused(tmp_path):
    with refused("workload.inner", "parts/burn_p2p"):
        inner(tmp_path)


def test_a_class_that_gives_no_gradients_is_refused(tmp_path):
    one = Worker(run_of(tmp_path, workload__factory="strange:Inner"), ROWS, for_training=False)
    with refused("parts/burn_p2p", "gradient"):
        one.describe()
