"""`[model.LLM]` lr_schedule: the learning rate by step. Each variant is a class.

A class is named after its enum and Psyche's variant. Fields and rules are Psyche's, those of its
`Model::check` included; numbers that Psyche never checks are checked. `lockstep/optim/schedules.py`
has the equations.
"""

from typing import TYPE_CHECKING

from pydantic import model_validator

from lockstep.tables.table import U32, NotNegative, wrong
from lockstep.tables.variant import Variant, one_of

if TYPE_CHECKING:
    from lockstep.optim.schedules import LearningRate


class ScheduleVariant(Variant):
    """Learning rate by step: a linear warm-up over warmup_steps, then the variant's."""

    where = "model.LLM.lr_schedule"

    base_lr: NotNegative
    """Learning rate at the end of the warm-up."""
    warmup_init_lr: NotNegative
    """Learning rate at step 0, from which the warm-up starts; the first trained step is 1."""
    warmup_steps: U32
    """Length of the warm-up in steps; 0 means no warm-up."""


class ScheduleConstant(ScheduleVariant):
    """A constant base_lr."""


class Decaying(ScheduleVariant):
    """A schedule that decays to a final learning rate."""

    total_steps: U32
    """Step at which final_lr is reached; the rate is constant afterwards. It must be above
    warmup_steps."""
    final_lr: NotNegative
    """Learning rate at total_steps and afterwards."""

    @model_validator(mode="after")
    def _decay_has_steps(self) -> "Decaying":
        if self.total_steps <= self.warmup_steps:
            raise wrong("total_steps", f"more than warmup_steps ({self.warmup_steps})")
        return self


class ScheduleLinear(Decaying):
    """A straight line from base_lr to final_lr."""


class ScheduleCosine(Decaying):
    """Half a cosine from base_lr to final_lr; unlike Psyche's, it never rises again."""


class ScheduleWarmupStableDecay(ScheduleVariant):
    """A stable phase at base_lr, a cosine decay, and a linear decay."""

    stable_steps: U32
    """Length of the stable phase after the warm-up, in steps."""
    cosine_decay_steps: U32
    """Length of the cosine decay in steps."""
    cosine_decay_final_lr: NotNegative
    """Learning rate at the end of the cosine decay; at most base_lr."""
    linear_decay_steps: U32
    """Length of the linear decay in steps."""
    linear_decay_final_lr: NotNegative
    """Learning rate after the linear decay; at most cosine_decay_final_lr."""

    @model_validator(mode="after")
    def _rates_fall(self) -> "ScheduleWarmupStableDecay":
        if self.cosine_decay_final_lr > self.base_lr:
            raise wrong("cosine_decay_final_lr", f"at most base_lr ({self.base_lr})")
        if self.linear_decay_final_lr > self.cosine_decay_final_lr:
            most = self.cosine_decay_final_lr
            raise wrong("linear_decay_final_lr", f"at most cosine_decay_final_lr ({most})")
        return self


AnySchedule = one_of(ScheduleVariant)


def learning_rate_of(table: ScheduleVariant) -> "LearningRate":
    """Return the learning-rate schedule of a table, whose keys are the function's arguments."""
    from lockstep.optim import schedules  # with JAX, which reading a run file does not need

    schedule = {
        ScheduleConstant: schedules.constant,
        ScheduleLinear: schedules.linear,
        ScheduleCosine: schedules.cosine,
        ScheduleWarmupStableDecay: schedules.warmup_stable_decay,
    }[type(table)]
    return schedule(**dict(table))
