"""Local steps by torchrun, in two processes: those of one process over the same rows."""

import sys
from contextlib import closing

import numpy as np
import pytest

from parts.workload import inner_steps
from parts.workload.worker import Worker
from tests import tiny
from tests.parts.workload.worker_host import PYTHON

ROWS = {"kind": "tokens", "columns": ["inputs"], "length": 16}
TORCHRUN = ["--standalone", "--nproc-per-node=2", "-m", "lockstep_worker.data_parallel"]


def worker(**workload) -> Worker:
    inner = {"DiLoCo": {**tiny.DILOCO["DiLoCo"], "inner": "Workload"}}
    given = {
        "workload__factory": "torch_language_model:GRU",
        "workload__config": {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "dropout": 0.0},
        "model__LLM__architecture": "HfAuto",
        "model__LLM__checkpoint": "Ephemeral",
        "model__LLM__optimizer": inner,
        "runtime__worker_python": sys.executable,
    }
    return Worker(tiny.parsed(**given | workload), ROWS)


@pytest.mark.parametrize("own", ["inner_step", "run_inner_loop"])
def test_a_class_with_steps_of_its_own_is_refused(monkeypatch, own):
    for place in PYTHON:
        monkeypatch.syspath_prepend(str(place))
    from lockstep_worker import TorchWorkload, data_parallel

    usual = {"inner_optimizer": lambda self, model: None}
    data_parallel.check(type("Mine", (TorchWorkload,), usual)({}))
    mine = type("Mine", (TorchWorkload,), {**usual, own: lambda self, *_: 0.0})
    with pytest.raises(SystemExit, match=f"Mine has its own {own}, expected the usual"):
        data_parallel.check(mine({}))


@pytest.mark.long
def test_torchrun_takes_the_steps_of_the_worker():
    draw = np.random.default_rng(0)
    lots = [
        draw.integers(tiny.VOCABULARY, size=(count, 16), dtype=np.int32) for count in (5, 1)
    ]  # shares of 2 and 3 rows, and of none and 1
    one = worker(workload__inner="worker")
    several = worker(workload__inner="command", workload__command=["torchrun", *TORCHRUN])
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
