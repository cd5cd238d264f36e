"""Local steps that a workload takes by its own optimizer: all those of a round at once.

How a worker is asked for them is the matter of another part, which offers the joint "inner_loop".
What the workload's optimizer goes on with, bytes of any length, is a part of what a peer owns: it
is in checkpoints, snapshots and the hashes that peers commit to.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Optimizer, Tree, inside
from lockstep.optim.schedules import LearningRate
from lockstep.programs.local_training import Agreed, HostSteps, Lots, Work
from parts.workload.worker import Worker, inner_loops

NO_STATE = np.zeros(1, np.uint8)  # a zero after no encoding: checkpoints hold no empty arrays


class Job(NamedTuple):
    """The work for an inner loop of local steps.

    params: Where the steps begin. lots: Rows of each step, int32 [N, W]. rates: Learning rate of
    each step. state: As in `StepsTaken`; at first `NO_STATE`. name: What tells it from all others.
    seed: Of its randomness.
    """

    params: Tree
    lots: Sequence[np.ndarray]
    rates: Sequence[float]
    state: np.ndarray
    name: str
    seed: int


class StepsTaken(NamedTuple):
    """What the local steps of a round by a workload came to.

    params: The peer's params. loss: The mean loss of the steps. state: What the optimizer goes on
    with: the name of its encoding, a zero, and its bytes.
    """

    params: Tree
    loss: float
    state: np.ndarray


def take(worker: Worker, job: Job) -> StepsTaken:
    """Have a worker, or the run's command, take all local steps of a round at once.

    Raises:
      WorkerError: It did not, or left something else than was expected.
    """
    return StepsTaken(*worker.ask(lambda session: inner_loops().take(worker, session, job)))


class WorkloadOwn(NamedTuple):
    """What a peer owns where a workload takes its local steps.

    Attributes:
      optimizer: `own` of the run's optimizer.
      state: What the workload's optimizer goes on with: uint8, of any length.
    """

    optimizer: Tree
    state: jax.Array


def with_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose `own` has the state of a workload's optimizer beside it.

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
        """Return a peer's state after the workload's steps, and their mean loss."""
        steps, round_ = self.lots.steps, int(step)
        inner = self.align_before(own.optimizer, agreed.params, step, np.int32(0))
        rows_HNW = [rows_NW for rows_NW in self.lots.rows(work) if rows_NW is not None]
        if not rows_HNW:
            return own._replace(optimizer=inner), jnp.float32(0)
        done = self.rounds_done(step, steps - 1)
        ahead = self.optimizer.lookahead(agreed.params, inner, agreed.shared, done)
        seed = self.seed_of(round_, 0, rows_HNW)
        rates = [np.float32(round_ - 1 + (h + 1) / steps) for h in range(len(rows_HNW))]
        result = take(
            self.worker,
            Job(
                params=ahead,
                lots=rows_HNW,
                rates=[float(np.asarray(self.learning_rate(rate))) for rate in rates],
                state=np.asarray(own.state),
                name=f"inner-{round_:05}-{seed:08x}",
                seed=seed,
            ),
        )
        drift = jax.tree.map(lambda x, after: np.asarray(x) - after, ahead, result.params)
        after = self.optimizer.accumulate(drift, inner, agreed.params, done)
        return WorkloadOwn(after, result.state), jnp.float32(result.loss)
