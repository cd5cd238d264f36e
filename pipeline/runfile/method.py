"""The optimizer and the learning rate of a run file."""

from collections.abc import Collection

from lockstep.methods.card import Setting, build
from lockstep.methods.schedule import learning_rate_of
from lockstep.optim import schedules
from lockstep.optim.optimizer import Optimizer
from lockstep.optim.schedules import LearningRate
from pipeline.runfile.run import Run


def learning_rate_of_run(run: Run, first_step: int = 0) -> LearningRate:
    """Return a run's learning rate by step.

    `first_step` is the rounds trained by the run that this one extends, 0 for a new run.
    """
    learning_rate = learning_rate_of(run.llm.lr_schedule)
    if not first_step:
        return learning_rate
    # what Psyche calls a cold start: the first epoch after a pause
    llm = run.llm
    return schedules.cold_start(
        learning_rate, first_step + 1, llm.cold_start_warmup_steps, llm.inner_steps
    )


def optimizer_of_run(
    run: Run, groups: Collection[str], stacked: tuple[str, ...] = (), first_step: int = 0
) -> Optimizer:
    """Return a run's optimizer; `first_step` is as in `learning_rate_of_run`.

    `groups` are the top-level names of the params, and `stacked` those whose leaves carry a leading
    layer axis.
    """
    peers = run.peers
    rate = learning_rate_of_run(run, first_step)
    setting = Setting(rate, peers.overlap, stacked, peers.aggregation, peers.liars or 0)
    return build(run.llm.optimizer, setting, groups)
