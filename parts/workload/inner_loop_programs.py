"""The programs of a run whose local steps a workload takes, by its own optimizer.

The workload's state, bytes of any length, is a part of what a peer owns: it is in checkpoints,
snapshots and the hashes that peers commit to.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Optimizer, Tree, inside
from lockstep.optim.schedules import LearningRate
from lockstep.programs.task import Task
from lockstep.programs.train_step import Agreed, Programs, Work
from parts.workload import inner_loop
from parts.workload.inner_loop import NO_STATE
from parts.workload.programs import WorkloadPrograms, lots
from parts.workload.worker import Worker


class WorkloadOwn(NamedTuple):
    """A peer's own state when a workload takes its local steps.

    Attributes:
      optimizer: `own` of the run's optimizer.
      state: What the workload's optimizer goes on with: uint8, of any length.
    """

    optimizer: Tree
    state: jax.Array


def with_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose `own` has a workload's state beside it."""

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        return WorkloadOwn(own, jnp.asarray(NO_STATE)), shared

    return inside(optimizer)._replace(init=init)


class InnerLoopPrograms(WorkloadPrograms):
    """The programs of a workload that takes all local steps of a round by its own optimizer.

    Its steps reach the run's optimizer as one: theta_p <- theta_p - (theta_p - where they led to).

    Args:
      task: What is trained.
      optimizer: How peers train it; its inner optimizer is SGD with a learning rate of 1.
      worker: Takes the steps.
      seed: Seed of their randomness.
      wire: Encoding of messages.
      learning_rate: The run's schedule, which the workload gets.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        worker: Worker,
        seed: int,
        wire: str,
        learning_rate: LearningRate,
    ):
        # its functions never see the state, whose length would compile them anew
        self.plain = plain = WorkloadPrograms(task, optimizer, worker, seed, wire)
        compiled = optimizer._replace(send=plain._send, compare=plain._compare_sent)
        super().__init__(task, with_state(compiled), worker, seed, wire)
        self.learning_rate = learning_rate

    _send, _compare_sent = Programs._send, Programs._compare_sent  # compiled above

    def _local_steps(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        steps, round_ = self.optimizer.inner_steps, int(step)
        inner = self.plain._align_before(own.optimizer, agreed.params, step, np.int32(0))
        rows_HNW = [rows_NW for rows_NW in lots(work, self) if rows_NW is not None]
        if not rows_HNW:
            return own._replace(optimizer=inner), jnp.float32(0)
        done = step if steps == 1 else np.float32(round_)  # rounds
        ahead = self.plain._lookahead(agreed.params, inner, agreed.shared, done)
        seed = self._seed_of(round_, 0, rows_HNW)
        taken = inner_loop.take(
            self.worker,
            inner_loop.Job(
                params=ahead,
                lots=rows_HNW,
                rates=[self._rate(round_ - 1 + (h + 1) / steps) for h in range(len(rows_HNW))],
                state=np.asarray(own.state),
                name=f"inner-{round_:05}-{seed:08x}",
                seed=seed,
            ),
        )
        drift = jax.tree.map(lambda x, after: np.asarray(x) - after, ahead, taken.params)
        after = self.plain._accumulate(drift, inner, agreed.params, done)
        return WorkloadOwn(after, taken.state), jnp.float32(taken.loss)

    def _rate(self, done: float) -> float:
        return float(np.asarray(self.learning_rate(np.float32(done))))
