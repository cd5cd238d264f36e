"""The largest micro-batch that fits into memory, by the compiler's own figures."""

from collections.abc import Callable

import jax

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.device_memory import device_memory
from lockstep.programs.train_step import Programs


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
    """Return whether all peers fit into memory at the worst moment of a round.

    XLA states what a compiled program allocates, so nothing is tried that could fail half-way or
    have the process killed. The programs that are compiled here are those that train. `rows_N` are
    those of one peer's local step, `size` of them a micro-batch. `limit` is in bytes; by default it
    is that of a device, or of this machine where devices are its processors.
    """
    lots = programs.optimizer.inner_steps
    most = lots * len(jax.tree.leaves(rows_N)[0])
    work = programs.work(jax.tree.map(lambda x: x[:1], rows_N), most, size)
    try:
        needed = device_memory(programs, peers, work)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return False
        raise
    return needed is None or needed.of_limit <= (limit or needed.limit)
