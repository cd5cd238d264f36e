"""A peer's local steps of a round, and their two ways: in one program of XLA, or outside of it.

Shapes in names: H local steps, M micro-batches of B rows, N rows.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim import optimizer as optim
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.programs.task import Task
from lockstep.same_bits.evaluation import same_bits
from lockstep.same_bits.products import Product

LARGE_MODEL = 2**26  # parameters of which two states are not held at a time


class Agreed(NamedTuple):
    """What all peers have alike: the params, and the optimizer's shared state."""

    params: Tree
    shared: Tree


class Work(NamedTuple):
    """What a peer trains on in a round, or in one of its local steps.

    Rows are in micro-batches, arrays [M, B, ...]; those after the first `count` are padding.
    """

    rows_MB: Tree
    count: int | jax.Array


class Lots(NamedTuple):
    """How a peer's rows of a round are divided among its local steps.

    Attributes:
      steps: Local steps of a round.
      size: Rows of a local step, where a peer with fewer rows takes fewer steps. None where it
        takes as many, on fewer rows each.
    """

    steps: int
    size: int | None = None

    def rows_of(self, count: Any, local: Any) -> Any:
        """Return how many of a peer's `count` rows of a round go to its local step `local`.

        The steps are counted from 0. Integers or int32 arrays, as the arguments are.
        """
        if self.size is None:
            return count // self.steps + (local < count % self.steps)
        return (count - local * self.size).clip(0, self.size)

    def steps_for(self, count: Any) -> Any:
        """Return how many local steps a peer takes on this many rows: int32 arrays of any shape."""
        if self.size is None:
            return count.clip(0, self.steps)
        return -(-count // self.size)

    def rows(self, work: Work) -> list[Tree | None]:
        """Return the rows of each local step, without padding; None where a step has none."""
        rows_HN = jax.tree.map(
            lambda x: np.asarray(x).reshape(self.steps, -1, *x.shape[2:]), work.rows_MB
        )
        sizes = self.rows_of(np.int32(work.count), np.arange(self.steps))
        return [
            jax.tree.map(lambda x, h=h, size=size: x[h, :size], rows_HN) if size else None
            for h, size in enumerate(sizes)
        ]


class Gradient(Protocol):
    """Computes losses and gradients of local steps outside of XLA: a worker's process, or torch.

    Attributes:
      measures: Whether it gives the loss of any row.
      environment: Everything in it that can change the bits of a result.
      shards: Folder in which rows that are names of files are looked up.
      rows_to_count: Rows without which it measures nothing, int32 [N, W]; None if it needs none.
    """

    measures: bool
    environment: dict[str, str]
    shards: Path
    rows_to_count: np.ndarray | None

    def gradient(self, params: Tree, rows_N: Tree, seed: int) -> tuple[float, Tree]:
        """Return the mean loss of a local step's rows, and its gradient: NumPy, in nested dicts."""

    def measure(self, params: Tree, rows_N: Tree) -> np.ndarray:
        """Return what is measured of some rows, outside of XLA."""

    def close(self) -> None:
        """Let go of the process that computes gradients, if it has one."""


class Itself:
    """Stands where a `Gradient` would, for steps whose own program computes their gradients."""

    measures, environment, shards, rows_to_count = True, dict[str, str](), Path(), None

    def close(self) -> None:
        """Let go of nothing: local steps in their own program have no process."""


class Stepper(Protocol):
    """Takes the local steps of peers.

    Attributes:
      traced: Whether JAX traces `take`, so that a whole round of a peer is one program.
      by: Who computes the losses and gradients.
    """

    traced: bool
    by: Gradient | Itself

    def take(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return a peer's state after its local steps of a round, and their mean loss."""

    def measure(self, params: Tree, rows_B: Tree) -> jax.Array:
        """Return what is measured of rows, see `Task.measure`."""


class TracedSteps:
    """Local steps that are a part of one program, of any task in JAX.

    `large` says whether a state is so large that two of them are not held at a time; `keep_cut`
    keeps arrays cut over the devices of a peer. With a `product` the gradient of a micro-batch and
    what is measured go by the rules of `same_bits`, with this product of matrices.
    """

    traced = True

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        lots: Lots,
        large: bool,
        keep_cut: Callable[[Tree], Tree],
        product: Product | None = None,
    ):
        self.task, self.optimizer, self.lots = task, optimizer, lots
        self.large, self.keep_cut = large, keep_cut
        measure, gradient = task.measure, jax.value_and_grad(task.loss, has_aux=task.sums)
        if product:
            measure, gradient = same_bits(measure, product), same_bits(gradient, product)
        self.measure, self._gradient, self.by = jax.jit(measure), gradient, Itself()

    def take(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return a peer's state after its local steps, each on its lot, and their mean loss.

        Where there are fewer rows than local steps, the last lots are empty: nothing is done.
        """
        steps, count = self.lots.steps, work.count
        if steps == 1:
            own = optim.align(self.optimizer, own, agreed.params, step)
            return self._step(own, agreed, work, step, self.task.key(work.rows_MB, step, 0))
        rows_HMB = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), work.rows_MB)

        def take(h: jax.Array, carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            own, total = carry
            own = optim.align_before(self.optimizer, own, agreed.params, step, h)
            lot = self.lots.rows_of(count, h)
            done = step - 1 + (h + 1) / steps  # rounds
            rows_MB = jax.tree.map(lambda x: x[h], rows_HMB)
            key = self.task.key(rows_MB, step, h)

            def train(own: Tree) -> tuple[Tree, jax.Array]:
                return self._step(own, agreed, Work(rows_MB, lot), done, key)

            # A choice between two states needs both at once. Programs of smaller ones keep it, for
            # the sake of equal bits: those of a branch are others.
            if self.large:
                own, loss = jax.lax.cond(lot > 0, train, lambda own: (own, jnp.zeros(())), own)
            else:
                after, loss = train(own)
                own = jax.tree.map(partial(jnp.where, lot > 0), after, own)
            # The loss of padding alone may be NaN.
            return self.keep_cut(own), total + jnp.where(lot > 0, loss, 0.0)

        own, total = jax.lax.fori_loop(0, steps, take, (self.keep_cut(own), jnp.zeros(())))
        taken = jnp.minimum(count, steps) if self.lots.size is None else self.lots.steps_for(count)
        return own, total / taken

    def _step(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array, key: jax.Array | None
    ) -> tuple[Tree, jax.Array]:
        """Take one local step in a program; `step` is as `Optimizer` has it."""
        ahead = self.optimizer.lookahead(agreed.params, own, agreed.shared, step)
        loss, grads = self.gradient(ahead, *work, key)
        return self.optimizer.accumulate(grads, own, agreed.params, step), loss

    def gradient(
        self, params: Tree, rows_MB: Tree, count: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        """Return a local step's mean loss and gradient over `count` rows, by the task's weights.

        The number of micro-batches is dynamic, so a batch ramp or an uneven assignment recompiles
        nothing; if no peer is ever assigned more than one, there is no loop.
        """
        micro_batches, size = jax.tree.leaves(rows_MB)[0].shape[:2]
        weigh = self.task.weights(rows_MB, count)

        def gradient_of_one(micro: jax.Array | int) -> tuple[Tree, Tree]:
            weight = weigh(micro)
            rows_B = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, micro, keepdims=False), rows_MB
            )
            rng = None if key is None else jax.random.fold_in(key, micro)
            return self._gradient(params, rows_B, weight, rng)

        def add(micro: jax.Array, sums: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            return jax.tree.map(jnp.add, sums, gradient_of_one(micro))

        if micro_batches == 1:  # no sums: two passes over all gradients fewer
            value, grads = gradient_of_one(0)
        else:
            none = (jnp.zeros(()), jnp.zeros(())) if self.task.sums else jnp.zeros(())
            zero = none, self.keep_cut(jax.tree.map(jnp.zeros_like, params))
            value, grads = jax.lax.fori_loop(0, (count + size - 1) // size, add, zero)
        if self.task.sums:
            total, count = value
            divisor = jnp.where(count == 0, 1.0, count)
            value, grads = total / divisor, jax.tree.map(lambda g: g / divisor, grads)
        return value, self.keep_cut(grads)


def is_large(parameters: int) -> bool:
    """Return whether so many parameters count as large, which decides bits: on all machines."""
    return parameters >= LARGE_MODEL


def micro_batches(
    rows_N: Tree, capacity: int, size: int, lots: int = 1, lot: int | None = None
) -> Tree:
    """Cut a local step's rows into micro-batches of one shape, padded with zeros: [M, B, ...].

    Args:
      rows_N: Rows assigned to a peer, NumPy arrays [N, ...].
      capacity: Largest number of rows that any peer is assigned.
      size: Rows in a micro-batch (B).
      lots: Local steps of a round, each of which has M / lots micro-batches: its rows, as many as
        the others' or, of the first ones, one more.
      lot: Rows of each local step, as long as there are any; by default all have about as many.
    """
    micro = -(-capacity // (lots * size))  # of a lot

    def cut(rows_N: np.ndarray) -> np.ndarray:
        shape = rows_N.shape[1:]
        if len(rows_N) == lots * micro * size:  # all are full
            return rows_N.reshape(lots * micro, size, *shape)
        padded = np.zeros((lots, micro * size, *shape), rows_N.dtype)
        ends = lots if lot is None else range(lot, lots * lot, lot)
        for part, rows in zip(padded, np.array_split(rows_N, ends), strict=True):
            part[: len(rows)] = rows
        return padded.reshape(lots * micro, size, *shape)

    return jax.tree.map(cut, rows_N)


def one_by_one(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose functions are compiled each by itself, for `HostSteps`."""
    ahead = optimizer.lookahead
    return optimizer._replace(
        lookahead=jax.jit(ahead) if optimizer.looks_ahead else ahead,
        accumulate=jax.jit(optimizer.accumulate, donate_argnums=1),
        send=jax.jit(optimizer.send, donate_argnums=0),
    )


class HostSteps:
    """Local steps by somebody else's gradients, from a worker's process or from torch.

    They are cut where JAX ends: the optimizer's functions are compiled one by one, and between them
    somebody else computes a gradient. Whoever takes a peer's step, a trainer, a verifier or an
    auditor, calls the same functions in the same order.

    The optimizer is one of `one_by_one`; `seed` is that of the gradients' randomness.
    """

    traced = False

    def __init__(self, optimizer: Optimizer, lots: Lots, gradient: Gradient, seed: int):
        self.optimizer, self.lots, self.by, self.seed = optimizer, lots, gradient, seed

        def aligned(own: Tree, params: Tree, step: jax.Array, local: jax.Array) -> Tree:
            return optim.align_before(optimizer, own, params, step, local)

        self.align_before = (
            jax.jit(aligned, donate_argnums=0) if optimizer.aligns else lambda own, *_: own
        )

    def measure(self, params: Tree, rows_B: Tree) -> np.ndarray:  # noqa: D102
        return self.by.measure(params, jax.device_get(rows_B))

    def take(  # noqa: D102
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        round_, total = int(step), 0.0
        for h, rows_N in enumerate(self.lots.rows(work)):
            own = self.align_before(own, agreed.params, step, np.int32(h))
            if rows_N is None:
                continue
            done = self.rounds_done(step, h)
            ahead = self.optimizer.lookahead(agreed.params, own, agreed.shared, done)
            loss, grads = self.by.gradient(ahead, rows_N, self.seed_of(round_, h, rows_N))
            own = self.optimizer.accumulate(grads, own, agreed.params, done)
            total += loss
        return own, jnp.float32(total / max(1, int(self.lots.steps_for(np.int32(work.count)))))

    def rounds_done(self, step: jax.Array, local: int) -> jax.Array | np.float32:
        """Return the rounds that are done with a local step, as `Optimizer` takes them."""
        steps = self.lots.steps
        return step if steps == 1 else np.float32(int(step) - 1 + (local + 1) / steps)

    def seed_of(self, step: int, local: int, rows_N: Tree) -> int:
        """Return the 32-bit seed of a local step's randomness, whoever computes its gradient."""
        digest = hashlib.sha256(f"lockstep/gradient:{self.seed}:{step}:{local}:".encode())
        for leaf in jax.tree.leaves(rows_N):
            digest.update(np.ascontiguousarray(leaf))
        return int.from_bytes(digest.digest()[:4], "little")
