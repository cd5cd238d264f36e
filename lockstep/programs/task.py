"""What a run trains: a task has the params' shapes, the loss and the measure."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from lockstep.optim.optimizer import Tree

OTHER_PRECISION = {"float32": "bfloat16", "bfloat16": "float32"}


class Task(Protocol):
    """Something to train, on rows: examples of any kind, as a tree of arrays with leading axes.

    A peer's work of a round is [M, B, ...], micro-batches of rows. `LanguageModel` is the task of
    a run file; `simulate` has another for any loss.
    """

    sums: bool
    """Whether only a loss says how much counts in it: `weights` do not make shares of the mean."""

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the task's params: nested dicts."""

    @property
    def imprecise(self) -> "Task":
        """The same task in `OTHER_PRECISION`, for a peer with that fault."""

    def weights(self, rows_MB: Tree, count: jax.Array) -> Callable[[jax.Array | int], Tree]:
        """Return the task's micro -> weight, by which `loss` weighs the rows of a micro-batch.

        Rows after the first `count`, int32 [], are padding.
        """

    def loss(self, params: Tree, rows_B: Tree, weight: Tree, rng: jax.Array | None) -> Any:
        """Return a micro-batch's share of the task's mean loss over all rows of a local step.

        With `sums` the sum of its losses, and how much counts in it. The first number is
        differentiated with respect to `params`.
        """

    def key(self, rows_MB: Tree, step: jax.Array, local_step: jax.Array | int) -> jax.Array | None:
        """Return the key of the task's randomness in a local step, or None without any.

        Its rows tell whose they are. Rounds are counted from 1, and local steps from 0 in each.
        """

    def measure(self, params: Tree, rows_B: Tree) -> Any:
        """Return the task's loss of rows as it is measured, without randomness."""
