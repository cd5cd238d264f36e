"""The largest micro-batch that fits is found without trying."""

import jax
import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.optim.dense import sgd
from lockstep.programs.device_memory import device_memory
from lockstep.programs.train_step import Programs
from lockstep.simulation.loss_task import LossTask, Nesting, PeerRows
from lockstep.simulation.rounds import fits_into_memory, largest


def test_halves_until_it_fits():
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 3

    assert largest(fits, 10) == 3
    assert tried == [10, 5, 3]
    with pytest.raises(LockstepError, match="a single example does not fit into memory"):
        largest(lambda size: False, 10)


def test_what_a_step_needs_grows_with_the_micro_batch():
    params = {"w": np.zeros((64, 64), np.float32)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def loss(params, batch, rng):
        for _ in range(4):
            batch = jax.numpy.tanh(batch @ params["w"])
        return batch.mean()

    task = LossTask(loss, Nesting(params), shapes, np.dtype(np.float32), 0, 512)
    programs = Programs(task, sgd(0.1, momentum=0.0, nesterov=False))
    rows = PeerRows(np.zeros((512, 64), np.float32), np.zeros(512, np.int32))
    limit = 2**20
    assert not fits_into_memory(programs, 2, rows, 512, limit)
    assert fits_into_memory(programs, 2, rows, 8, limit)
    assert fits_into_memory(programs, 2, rows, 512)  # this machine has more
    planned = device_memory(programs, 2, programs.work(rows, 512, 512))  # as `lockstep plan`
    assert fits_into_memory(programs, 2, rows, 512, planned.needed)
    assert not fits_into_memory(programs, 2, rows, 512, planned.needed - 1)
