"""The largest micro-batch that fits into memory: the compiler knows, so nothing runs out of it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.programs.train_step import Programs, micro_batches
from pipeline.stage import memory


def largest(fits: Callable[[int], bool], batch_size: int) -> int:
    """Return the first of batch_size, its half, the half of that ... that fits.

    Raises:
      LockstepError: Not even one example fits.
    """
    size = batch_size
    while not fits(size):
        if size == 1:
            raise LockstepError(
                "simulate: batch_size: a step on a single example does not fit into memory, "
                "expected a smaller model or fewer peers"
            )
        size = -(-size // 2)
    return size


def fits_into_memory(
    programs: Programs, peers: int, rows_N: Tree, size: int, limit: int | None = None
) -> bool:
    """Return whether all peers' states and a step with this micro-batch fit into memory.

    XLA states what a compiled program allocates, so nothing is tried that could fail half-way or
    have the process killed. The program that is compiled here is the one that trains.

    Args:
      programs: What trains.
      peers: Number of peers.
      rows_N: The rows of one peer's local step.
      size: Examples in a micro-batch.
      limit: Bytes; by default of a device, or of this machine where devices are its processors.
    """
    count, lots = len(jax.tree.leaves(rows_N)[0]), programs.optimizer.inner_steps
    rows_N = jax.tree.map(lambda x: np.repeat(x[:1], count * lots, axis=0), rows_N)
    rows_MB = micro_batches(rows_N, count * lots, size, lots)
    params = programs.task.shapes
    own, shared = jax.eval_shape(programs.optimizer.init, params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    # as they lie where peers train: it is the same program then, and compiled once
    on_device = SingleDeviceSharding(jax.devices()[0])
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
        (params, own, shared, rows_MB, number, number),
    )
    try:
        step = programs.peer_step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return False
        raise
    used = step.memory_analysis()
    if used is None:  # this backend does not tell
        return True
    devices = jax.devices()
    here = devices[0].platform == "cpu"  # whose devices share one memory
    at_once = min(peers, len(devices)) if here else 1
    held = peers if here else -(-peers // len(devices))
    needed = at_once * (used.temp_size_in_bytes + used.output_size_in_bytes)
    needed += used.argument_size_in_bytes + held * sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(own)
    )
    return needed <= (limit or _limit(devices[0]))


def _limit(device: jax.Device) -> int:
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or memory.total()
