"""Psyche's learning-rate schedules as optax schedules: step -> learning rate, float32.

The first step trained is step 1. A schedule takes Python integers and traced ones. Psyche computes
in float64; the difference is below one part in a million.

The tables of a run file check these arguments (`lockstep/methods/schedule.py`); functions do not.

With W = warmup_steps, every schedule is for step < W

    warmup_init_lr + (base_lr - warmup_init_lr) step / W

Arguments that schedules share:

    base_lr         learning rate at the end of the warm-up
    warmup_init_lr  learning rate at step 0
    warmup_steps    W, the steps of the warm-up; 0 for no warm-up
    total_steps     step at which the learning rate is final_lr, more than warmup_steps
    final_lr        learning rate from then on
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LearningRate: TypeAlias = Callable[[ArrayLike], jax.Array]


def constant(base_lr: float, warmup_init_lr: float, warmup_steps: int) -> LearningRate:
    """Return the schedule of a constant rate: base_lr after the warm-up."""
    decay = lambda step: jnp.full_like(step, base_lr)  # noqa: E731
    return _warmed_up(decay, base_lr, warmup_init_lr, warmup_steps)


def linear(
    base_lr: float, warmup_init_lr: float, warmup_steps: int, total_steps: int, final_lr: float
) -> LearningRate:
    """Return base_lr + (final_lr - base_lr) (step - W) / (total_steps - W), then final_lr."""
    begin, steps = float(warmup_steps), float(total_steps - warmup_steps)
    decay = lambda step: _line(base_lr, final_lr, _part(step, begin, steps))  # noqa: E731
    return _warmed_up(decay, base_lr, warmup_init_lr, warmup_steps)


def cosine(
    base_lr: float, warmup_init_lr: float, warmup_steps: int, total_steps: int, final_lr: float
) -> LearningRate:
    """Return final_lr + (base_lr - final_lr) (1 + cos(pi p)) / 2, p the done share of the decay.

    p = (step - W) / (total_steps - W) stays 1 after total_steps, and the learning rate final_lr.
    Psyche's p goes on growing: its learning rate rises again, and is base_lr once more at p = 2.
    """
    begin, steps = float(warmup_steps), float(total_steps - warmup_steps)
    decay = lambda step: _cosine(base_lr, final_lr, _part(step, begin, steps))  # noqa: E731
    return _warmed_up(decay, base_lr, warmup_init_lr, warmup_steps)


def warmup_stable_decay(
    base_lr: float,
    warmup_init_lr: float,
    warmup_steps: int,
    stable_steps: int,
    cosine_decay_steps: int,
    cosine_decay_final_lr: float,
    linear_decay_steps: int,
    linear_decay_final_lr: float,
) -> LearningRate:
    """Return base_lr for a while; then half a cosine; then a straight line; then its end.

    After the warm-up, `stable_steps` are at base_lr; `cosine_decay_steps` lead on to
    `cosine_decay_final_lr`, and `linear_decay_steps` to `linear_decay_final_lr`, which stays.
    """
    curve_steps, line_steps = float(cosine_decay_steps), float(linear_decay_steps)
    curve_begin = float(warmup_steps + stable_steps)
    line_begin = curve_begin + curve_steps
    middle, end = cosine_decay_final_lr, linear_decay_final_lr

    def decay(step: jax.Array) -> jax.Array:
        curve = _cosine(base_lr, middle, _part(step, curve_begin, curve_steps))
        line = _line(middle, end, _part(step, line_begin, line_steps))
        return jnp.where(step < curve_begin, base_lr, jnp.where(step < line_begin, curve, line))

    return _warmed_up(decay, base_lr, warmup_init_lr, warmup_steps)


def cold_start(
    learning_rate: LearningRate, start_step: int, cold_start_warmup_steps: int, local_steps: int = 1
) -> LearningRate:
    """Return the schedule in an epoch that follows a pause: from nothing up to its own value.

    The factor is (step - a) / (b - a) for a <= step <= b, and 1 elsewhere: 0 at step a, which is
    the first local step of the epoch. Source: Psyche, `Trainer::get_lr`, without local steps.

    Args:
      learning_rate: The schedule without a pause.
      start_step: The first step of the epoch, a without local steps.
      cold_start_warmup_steps: b - start_step; 0 leaves the schedule as it is.
      local_steps: Local steps of each step, H. They end at start_step - 1 + h / H for h = 1 to H,
        so that a is start_step - 1 + 1 / H.
    """
    if cold_start_warmup_steps == 0:
        return learning_rate
    before = start_step - 1.0  # the last step of the epoch before
    begin, end = before + 1 / local_steps, float(start_step + cold_start_warmup_steps)

    def warmed(step: ArrayLike) -> jax.Array:
        at = jnp.asarray(step, jnp.float32)
        # not at >= begin: both are rounded, and the first local step must not be left out
        return learning_rate(step) * jnp.where(at > before, _part(at, begin, end - begin), 1.0)

    return warmed


def _warmed_up(
    decay: Callable[[jax.Array], jax.Array],
    base_lr: float,
    warmup_init_lr: float,
    warmup_steps: int,
) -> LearningRate:
    warmup = float(warmup_steps)

    def learning_rate(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24, and never overflows
        rise = _line(warmup_init_lr, base_lr, _part(step, 0.0, warmup))
        return jnp.where(step < warmup, rise, decay(step))

    return learning_rate


def _part(step: jax.Array, begin: float, steps: float) -> jax.Array:
    """Return how much of a stretch of a schedule is done, 0 to 1; an empty stretch is done."""
    return jnp.clip((step - begin) / steps, 0, 1) if steps else jnp.ones_like(step)


def _line(start: float, end: float, part: jax.Array) -> jax.Array:
    return start + (end - start) * part


def _cosine(start: float, end: float, part: jax.Array) -> jax.Array:
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * part))
