"""Local steps by torchrun, in two processes: those of one process over the same rows."""

import sys
from contextlib import closing

import numpy as np
import pytest

from parts.workload import inner_steps
from tests import tiny
from tests.parts.workload.test_strange_workloads import inner

TORCHRUN = ["--standalone", "--nproc-per-node=2", "-m", "lockstep_worker.data_parallel"]
GRU = {
    "workload__factory": "torch_language_model:GRU",
    "workload__config": {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "dropout": 0.0},
    "runtime__worker_python": sys.executable,
}


@pytest.mark.parametrize("own", ["inner_step", "run_inner_loop"])
def test_a_class_with_steps_of_its_own_is_refused(module, own):
    data_parallel = module("lockstep_worker.data_parallel")
    base, usual = (data_parallel.TorchWorkload,), {"inner_optimizer": lambda self, model: None}
    data_parallel.check(type("Mine", base, usual)({}))
    mine = type("Mine", base, {**usual, own: lambda self, *_: 0.0})
    with pytest.raises(SystemExit, match=f"Mine has its own {own}, expected the usual"):
        data_parallel.check(mine({}))


@pytest.mark.long
def test_torchrun_takes_the_steps_of_the_worker(tmp_path, python):
    draw = np.random.default_rng(0)
    lots = [
        draw.integers(tiny.VOCABULARY, size=(count, 16), dtype=np.int32) for count in (5, 1)
    ]  # shares of 2 and 3 rows, and of none and 1
    one = inner(tmp_path, **GRU | {"runtime__worker_python": python})
    by_command = {"workload__inner": "command", "workload__command": ["torchrun", *TORCHRUN]}
    several = inner(tmp_path, **GRU, **by_command)
    with closing(one), closing(several):
        params = one.init()
        first = inner_steps.Job(params, lots, [0.1, 0.05], inner_steps.NO_STATE, "first", seed=1)
        begun = inner_steps.take(one, first)
        second = first._replace(params=begun.params, state=begun.state, name="second")
        expected, found = (inner_steps.take(which, second) for which in (one, several))
    assert abs(found.loss - expected.loss) < 1e-5
    assert found.state.size == expected.state.size != 1
    for leaf, value in expected.params["head"].items():
        np.testing.assert_allclose(found.params["head"][leaf], value, atol=1e-5)
        assert np.abs(value - begun.params["head"][leaf]).max() > 1e-3
