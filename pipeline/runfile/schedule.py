"""`[model.LLM]` lr_schedule: the learning rate by step. Each variant is a class.

A class is named after its enum and Psyche's variant. Fields and rules are Psyche's, those of its
`Model::check` included; numbers that Psyche never checks are checked. `pipeline/optim/schedules.py`
has the equations.
"""

from typing import Annotated

from pydantic import Field, model_validator

from pipeline.runfile.serde_enum import Variant, one_of
from pipeline.runfile.table import U32, wrong

Rate = Annotated[float, Field(ge=0)]


class ScheduleVariant(Variant):
    """The learning rate by step. Up to warmup_steps it rises linearly, then it is the variant's."""

    where = "model.LLM.lr_schedule"

    base_lr: Rate
    """The learning rate at the end of the warm-up."""
    warmup_init_lr: Rate
    """The learning rate at step 0; the first step trained is step 1."""
    warmup_steps: U32
    """Steps of the warm-up; 0 is none."""


class ScheduleConstant(ScheduleVariant):
    """base_lr."""


class Decaying(ScheduleVariant):
    """A schedule that ends at a learning rate of its own."""

    total_steps: U32
    """The step at which final_lr is reached; it stays there."""
    final_lr: Rate
    """The learning rate at the end."""

    @model_validator(mode="after")
    def _there_is_a_decay(self) -> "Decaying":
        if self.total_steps <= self.warmup_steps:
            raise wrong("total_steps", f"more than warmup_steps ({self.warmup_steps})")
        return self


class ScheduleLinear(Decaying):
    """A straight line from base_lr to final_lr."""


class ScheduleCosine(Decaying):
    """Half a cosine from base_lr to final_lr. (Psyche's rises again after total_steps.)"""


class ScheduleWarmupStableDecay(ScheduleVariant):
    """base_lr for a while, half a cosine to one learning rate, a straight line to another."""

    stable_steps: U32
    """Steps at base_lr after the warm-up."""
    cosine_decay_steps: U32
    """Steps of the half cosine."""
    cosine_decay_final_lr: Rate
    """The learning rate at the half cosine's end."""
    linear_decay_steps: U32
    """Steps of the straight line."""
    linear_decay_final_lr: Rate
    """The learning rate at the straight line's end, and after it."""

    @model_validator(mode="after")
    def _rates_fall(self) -> "ScheduleWarmupStableDecay":
        if self.cosine_decay_final_lr > self.base_lr:
            raise wrong("cosine_decay_final_lr", f"at most base_lr ({self.base_lr})")
        if self.linear_decay_final_lr > self.cosine_decay_final_lr:
            most = self.cosine_decay_final_lr
            raise wrong("linear_decay_final_lr", f"at most cosine_decay_final_lr ({most})")
        return self


AnySchedule = one_of(ScheduleVariant)
