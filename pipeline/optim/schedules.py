"""Psyche's learning-rate schedules as optax schedules: step -> learning rate, float32.

The first step trained is step 1. A schedule works on Python integers and inside `jit`. Psyche
computes in float64; the difference is below one part in a million.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pipeline.runfile.variants import (
    Schedule,
    ScheduleConstant,
    ScheduleCosine,
    ScheduleLinear,
    ScheduleWarmupStableDecay,
)

LearningRate = Callable[[ArrayLike], jax.Array]


def make(schedule: Schedule) -> LearningRate:
    """The schedule that a run file describes.

    With W = warmup_steps, for step < W every variant is

        warmup_init_lr + (base_lr - warmup_init_lr) step / W

    Args:
      schedule: one of the four variants.
    """
    match schedule:
        case ScheduleConstant():
            decay = constant(schedule)
        case ScheduleLinear():
            decay = linear(schedule)
        case ScheduleCosine():
            decay = cosine(schedule)
        case ScheduleWarmupStableDecay():
            decay = stable_decay(schedule)

    warmup = float(schedule.warmup_steps)

    def learning_rate(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24, and never overflows
        rise = _line(schedule.warmup_init_lr, schedule.base_lr, _part(step, 0.0, warmup))
        return jnp.where(step < warmup, rise, decay(step))

    return learning_rate


def constant(schedule: ScheduleConstant) -> LearningRate:
    """base_lr."""
    return lambda step: jnp.full_like(step, schedule.base_lr)


def linear(schedule: ScheduleLinear) -> LearningRate:
    """base_lr + (final_lr - base_lr) (step - W) / (total_steps - W), then final_lr."""
    warmup, decay_steps = _stretches(schedule)
    base, final = schedule.base_lr, schedule.final_lr
    return lambda step: _line(base, final, _part(step, warmup, decay_steps))


def cosine(schedule: ScheduleCosine) -> LearningRate:
    """final_lr + (base_lr - final_lr) (1 + cos(pi p)) / 2 for p = (step - W) / (total_steps - W).

    After total_steps p stays 1, and the learning rate final_lr. Psyche's p goes on growing: its
    learning rate rises again, and is base_lr once more at p = 2.
    """
    warmup, decay_steps = _stretches(schedule)
    base, final = schedule.base_lr, schedule.final_lr
    return lambda step: _cosine(base, final, _part(step, warmup, decay_steps))


def stable_decay(schedule: ScheduleWarmupStableDecay) -> LearningRate:
    """base_lr for stable_steps; half a cosine for cosine_decay_steps; a line; then its end."""
    curve_steps, line_steps = float(schedule.cosine_decay_steps), float(schedule.linear_decay_steps)
    curve_begin = float(schedule.warmup_steps + schedule.stable_steps)
    line_begin = curve_begin + curve_steps
    base, middle, end = (
        schedule.base_lr,
        schedule.cosine_decay_final_lr,
        schedule.linear_decay_final_lr,
    )

    def decay(step: jax.Array) -> jax.Array:
        curve = _cosine(base, middle, _part(step, curve_begin, curve_steps))
        line = _line(middle, end, _part(step, line_begin, line_steps))
        return jnp.where(step < curve_begin, base, jnp.where(step < line_begin, curve, line))

    return decay


def cold_start(
    learning_rate: LearningRate, start_step: int, cold_start_warmup_steps: int
) -> LearningRate:
    """The schedule in an epoch that follows a pause: from nothing up to its own value.

    The factor is (step - a) / (b - a) for a <= step <= b, and 1 elsewhere: exactly 0 at step a.
    Source: Psyche, `Trainer::get_lr`.

    Args:
      learning_rate: the schedule without a pause.
      start_step: a, the first step of the epoch.
      cold_start_warmup_steps: b - a; 0 leaves the schedule as it is.
    """
    if cold_start_warmup_steps == 0:
        return learning_rate
    begin, steps = float(start_step), float(cold_start_warmup_steps)

    def warmed(step: ArrayLike) -> jax.Array:
        at = jnp.asarray(step, jnp.float32)
        cold = (at >= begin) & (at <= begin + steps)
        return learning_rate(step) * jnp.where(cold, (at - begin) / steps, 1.0)

    return warmed


def _stretches(schedule: ScheduleLinear | ScheduleCosine) -> tuple[float, float]:
    """Steps of the warm-up, and of the decay after it."""
    return float(schedule.warmup_steps), float(schedule.total_steps - schedule.warmup_steps)


def _part(step: jax.Array, begin: float, steps: float) -> jax.Array:
    """How much of a stretch of steps is done, 0 to 1; a stretch of none is done."""
    return jnp.clip((step - begin) / steps, 0, 1) if steps else jnp.ones_like(step)


def _line(start: float, end: float, part: jax.Array) -> jax.Array:
    return start + (end - start) * part


def _cosine(start: float, end: float, part: jax.Array) -> jax.Array:
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * part))
