"""Local steps whose gradients are computed outside of JAX: by a worker's process, or by torch.

They are cut where JAX ends: the optimizer's functions are compiled one by one, and between them
somebody else computes a gradient. Whoever takes a peer's step, a trainer, a verifier or an auditor,
calls the same functions in the same order.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim import optimizer as optim
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.programs.local_steps import Agreed, Lots, Work


class Gradient(Protocol):
    """Computes losses and gradients on the host: a worker's process, or a torch module.

    Attributes:
      shards: Folder in which rows that are names of files are looked up.
    """

    shards: Path

    def gradient(self, params: Tree, rows_N: Tree, seed: int) -> tuple[float, Tree]:
        """Return the mean loss of some rows, and its gradient: NumPy arrays in nested dicts."""

    def measure(self, params: Tree, rows_N: Tree) -> np.ndarray:
        """Return what is measured of some rows."""

    @property
    def measures(self) -> bool:
        """Whether it gives the loss of any row."""

    @property
    def environment(self) -> dict[str, str]:
        """What of it can change the bits of a result."""

    def close(self) -> None:
        """Let go of its process, if it has one."""


def one_by_one(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose functions are compiled each by itself, for `HostSteps`."""
    ahead = optimizer.lookahead
    return optimizer._replace(
        lookahead=jax.jit(ahead) if optimizer.looks_ahead else ahead,
        accumulate=jax.jit(optimizer.accumulate, donate_argnums=1),
        send=jax.jit(optimizer.send, donate_argnums=0),
        compare=jax.jit(optimizer.compare, donate_argnums=0),
    )


class HostSteps:
    """Local steps by somebody else's gradients; `Stepper`.

    Args:
      optimizer: How peers train, of `one_by_one`.
      lots: How rows are divided among local steps.
      gradient: Who computes gradients.
      seed: Seed of their randomness.
    """

    traced = False

    def __init__(self, optimizer: Optimizer, lots: Lots, gradient: Gradient, seed: int):
        self.optimizer, self.lots, self.by, self.seed = optimizer, lots, gradient, seed

        def aligned(own: Tree, params: Tree, step: jax.Array, local: jax.Array) -> Tree:
            return optim.align_before(optimizer, own, params, step, local)

        self.align_before = jax.jit(aligned, donate_argnums=0)
        if not optimizer.aligns:
            self.align_before = lambda own, params, step, local: own

    @property
    def measures(self) -> bool:
        """Whether it gives the loss of any row."""
        return self.by.measures

    @property
    def environment(self) -> dict[str, str]:
        """What can change bits beside the versions and devices of JAX."""
        return self.by.environment

    def read_files_from(self, shards: Path) -> None:
        """Look up rows that are names of files in a folder."""
        self.by.shards = shards

    def close(self) -> None:
        """Let go of the process that computes gradients."""
        self.by.close()

    def measure(self, params: Tree, rows_B: Tree) -> np.ndarray:
        """Return what is measured of rows."""
        return self.by.measure(params, jax.device_get(rows_B))

    def take(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return a peer's state after its local steps of a round, and their mean loss."""
        round_, total = int(step), 0.0
        for h, rows_N in enumerate(self.rows(work)):
            own = self.align_before(own, agreed.params, step, np.int32(h))
            if rows_N is None:
                continue
            done = self.done(step, h)
            ahead = self.optimizer.lookahead(agreed.params, own, agreed.shared, done)
            loss, grads = self.by.gradient(ahead, rows_N, self.seed_of(round_, h, rows_N))
            own = self.optimizer.accumulate(grads, own, agreed.params, done)
            total += loss
        return own, jnp.float32(total / max(1, int(self.lots.taken(np.int32(work.count)))))

    def rows(self, work: Work) -> list[Tree | None]:
        """Return the rows of each local step, without padding; None where a step has none."""
        steps = self.lots.steps
        rows_HN = jax.tree.map(
            lambda x: np.asarray(x).reshape(steps, -1, *x.shape[2:]), work.rows_MB
        )
        sizes = self.lots.rows_of(np.int32(work.count), np.arange(steps))
        return [
            jax.tree.map(lambda x, h=h, size=size: x[h, :size], rows_HN) if size else None
            for h, size in enumerate(sizes)
        ]

    def done(self, step: jax.Array, local: int) -> jax.Array | np.float32:
        """Return the rounds that are done with a local step, as `Optimizer` takes them."""
        steps = self.lots.steps
        return step if steps == 1 else np.float32(int(step) - 1 + (local + 1) / steps)

    def seed_of(self, step: int, local: int, rows_N: Tree) -> int:
        """Return the seed of a gradient's randomness, of whoever computes it: 32 bits."""
        digest = hashlib.sha256(f"lockstep/gradient:{self.seed}:{step}:{local}:".encode())
        for leaf in jax.tree.leaves(rows_N):
            digest.update(np.ascontiguousarray(leaf))
        return int.from_bytes(digest.digest()[:4], "little")
