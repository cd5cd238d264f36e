"""Local steps that a workload takes by its own optimizer: all those of a round at once.

What its optimizer goes on with, bytes of any length, is a part of what a peer owns: it is in
checkpoints, snapshots and the hashes that peers commit to.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Optimizer, Tree, inside
from lockstep.optim.schedules import LearningRate
from lockstep.programs.local_steps import Agreed, HostSteps, Lots, Work
from parts.workload.inner import loop as inner_loop
from parts.workload.inner.loop import NO_STATE
from parts.workload.worker import Worker


class WorkloadOwn(NamedTuple):
    """What a peer owns where a workload takes its local steps.

    Attributes:
      optimizer: `own` of the run's optimizer.
      state: What the workload's optimizer goes on with: uint8, of any length.
    """

    optimizer: Tree
    state: jax.Array


def with_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose `own` has a workload's state beside it.

    Its functions never see the state, whose length would compile them anew.
    """

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        return WorkloadOwn(own, jnp.asarray(NO_STATE)), shared

    return inside(optimizer)._replace(init=init)


class InnerSteps(HostSteps):
    """Local steps by a workload's own optimizer; `Stepper`.

    They reach the run's optimizer as one: theta_p <- theta_p - (theta_p - where they led to).

    Args:
      optimizer: How peers train, without the workload's state; its inner optimizer is SGD with a
        learning rate of 1.
      lots: How rows are divided among local steps.
      worker: Takes the steps.
      seed: Seed of their randomness.
      learning_rate: The run's schedule, which the workload is told.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lots: Lots,
        worker: Worker,
        seed: int,
        learning_rate: LearningRate,
    ):
        super().__init__(optimizer, lots, worker, seed)
        self.worker, self.learning_rate = worker, learning_rate

    def take(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return a peer's state after the steps, and their mean loss."""
        steps, round_ = self.lots.steps, int(step)
        inner = self.align_before(own.optimizer, agreed.params, step, np.int32(0))
        rows_HNW = [rows_NW for rows_NW in self.rows(work) if rows_NW is not None]
        if not rows_HNW:
            return own._replace(optimizer=inner), jnp.float32(0)
        done = self.done(step, steps - 1)
        ahead = self.optimizer.lookahead(agreed.params, inner, agreed.shared, done)
        seed = self.seed_of(round_, 0, rows_HNW)
        rates = [np.float32(round_ - 1 + (h + 1) / steps) for h in range(len(rows_HNW))]
        taken = inner_loop.take(
            self.worker,
            inner_loop.Job(
                params=ahead,
                lots=rows_HNW,
                rates=[float(np.asarray(self.learning_rate(rate))) for rate in rates],
                state=np.asarray(own.state),
                name=f"inner-{round_:05}-{seed:08x}",
                seed=seed,
            ),
        )
        drift = jax.tree.map(lambda x, after: np.asarray(x) - after, ahead, taken.params)
        after = self.optimizer.accumulate(drift, inner, agreed.params, done)
        return WorkloadOwn(after, taken.state), jnp.float32(taken.loss)
