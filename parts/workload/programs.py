"""The programs of a run whose gradients a workload computes.

A round calls them as it calls those of a model of `models/`. They are cut where JAX ends: the
optimizer's functions are jitted, and between them the worker computes a gradient. Whoever takes a
peer's step, a trainer, a verifier or an auditor, calls the same functions in the same order.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim import optimizer as optim
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.programs.columns import PLAIN, Column
from lockstep.programs.placement import DeviceGroup
from lockstep.programs.task import Task
from lockstep.programs.train_step import Agreed, PeerResult, Programs, Work
from parts.workload.description import Description


class WorkloadTask:
    """The task of a workload: its params' shapes; the worker computes loss and gradient."""

    def __init__(self, described: Description, columns: tuple[Column, ...] = PLAIN):
        self.described, self.columns = described, columns

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the params."""
        return self.described.shapes

    @property
    def imprecise(self) -> NoReturn:
        """Raise: there is no other precision, and the run file's check refuses that fault."""
        raise LockstepError(
            f"workload {self.described.factory}: found the fault wrong_precision, expected none: "
            "its precision is its own"
        )


def lots(work: Work, programs: Programs) -> list[Tree | None]:
    """Return the rows of each local step, without padding; None where there are none for it."""
    steps = programs.optimizer.inner_steps
    rows_HN = jax.tree.map(lambda x: np.asarray(x).reshape(steps, -1, *x.shape[2:]), work.rows_MB)
    sizes = programs.lot_of(np.int32(work.count), np.arange(steps))
    return [
        jax.tree.map(lambda x, h=h, size=size: x[h, :size], rows_HN) if size else None
        for h, size in enumerate(sizes)
    ]


class Computes(Protocol):
    """What computes a workload's losses and gradients: a worker's process, or a torch module.

    shards: Folder in which rows that are names of files are looked up.
    """

    shards: Path

    def gradient(self, params: Tree, rows_N: Tree, seed: int) -> tuple[float, Tree]:
        """Return the mean loss of some rows, and its gradient: NumPy arrays in nested dicts."""

    def measure(self, params: Tree, rows_N: Tree) -> np.ndarray:
        """Return what is measured of some rows."""

    @property
    def measures(self) -> bool:
        """Whether the workload can measure the loss of any row."""

    @property
    def environment(self) -> dict[str, str]:
        """The settings that can change the bits of a result."""

    def close(self) -> None:
        """Let go of its process, if it has one."""


class WorkloadPrograms(Programs):
    """The programs of a workload and an optimizer, called as those of any task.

    Args:
      task: What is trained.
      optimizer: How peers train it.
      worker: Computes gradients and losses.
      seed: Seed of the gradients' randomness.
      wire: Encoding of messages.
      lot: As of `Programs`.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        worker: Computes,
        seed: int,
        wire: str = "lockstep",
        lot: int | None = None,
    ):
        super().__init__(task, optimizer, wire=wire, lot=lot)
        self.worker, self.seed = worker, seed

    def close(self) -> None:
        """End the worker's process."""
        self.worker.close()

    def read_files_from(self, shards: Path) -> None:
        """Have the worker look up rows that are names of files in such a folder of shards."""
        self.worker.shards = shards

    @property
    def measures(self) -> bool:
        """Whether the workload gives the loss of any row."""
        return self.worker.measures

    @property
    def environment(self) -> dict[str, str]:
        """The settings of the worker's process that can change the bits of a result."""
        return self.worker.environment

    @cached_property
    def peer_step(self) -> Callable[..., PeerResult]:
        """A peer's step; it waits for the worker, and donates `own`."""
        return self.step_of_a_peer

    @cached_property
    def compare(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """An audit's step on other hardware, see `Programs.compare`."""
        return self._compare

    @cached_property
    def measure(self) -> Callable[[Tree, Tree], np.ndarray]:
        """The measure of some rows: (params, rows_B) -> array."""
        return lambda params, rows_B: self.worker.measure(params, jax.device_get(rows_B))

    def put_rows(self, group: DeviceGroup, rows_MB: Tree) -> Tree:
        """Leave rows on the host, with their dtypes."""
        del group
        return rows_MB

    def compile_step(self, arguments: tuple) -> None:
        """Do nothing: parts of a step are compiled as they are first called."""
        del arguments

    def _local_steps(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        steps, round_ = self.optimizer.inner_steps, int(step)
        total = 0.0
        for h, rows_N in enumerate(lots(work, self)):
            own = self._align_before(own, agreed.params, step, np.int32(h))
            if rows_N is None:
                continue
            done = step if steps == 1 else np.float32(round_ - 1 + (h + 1) / steps)  # rounds
            ahead = self._lookahead(agreed.params, own, agreed.shared, done)
            loss, grads = self.worker.gradient(ahead, rows_N, self._seed_of(round_, h, rows_N))
            own = self._accumulate(grads, own, agreed.params, done)
            total += loss
        return own, jnp.float32(total / max(1, int(self.steps_of(np.int32(work.count)))))

    def _seed_of(self, step: int, local_step: int, rows_N: Tree) -> int:
        """The seed of a gradient's randomness, of whoever computes it: 32 bits."""
        digest = hashlib.sha256(f"lockstep/gradient:{self.seed}:{step}:{local_step}:".encode())
        for leaf in jax.tree.leaves(rows_N):
            digest.update(np.ascontiguousarray(leaf))
        return int.from_bytes(digest.digest()[:4], "little")

    # ---- The optimizer's functions ----

    @cached_property
    def _align_before(self) -> Callable[[Tree, Tree, jax.Array, np.int32], Tree]:
        if self.optimizer.align is optim.no_align:
            return lambda own, params, step, local: own

        def aligned(own: Tree, params: Tree, step: jax.Array, local: jax.Array) -> Tree:
            return optim.align_before(self.optimizer, own, params, step, local)

        return jax.jit(aligned, donate_argnums=0)

    @cached_property
    def _lookahead(self) -> Callable[..., Tree]:
        if not optim.looks_ahead(self.optimizer):
            return self.optimizer.lookahead
        return jax.jit(self.optimizer.lookahead)

    @cached_property
    def _accumulate(self) -> Callable[..., Tree]:
        return jax.jit(self.optimizer.accumulate, donate_argnums=1)

    @cached_property
    def _send(self) -> Callable[..., tuple[Tree, Tree]]:
        return jax.jit(self.optimizer.send, donate_argnums=0)

    @cached_property
    def _compare_sent(self) -> Callable[..., tuple[jax.Array, Tree]]:
        return jax.jit(self.optimizer.compare, donate_argnums=0)
