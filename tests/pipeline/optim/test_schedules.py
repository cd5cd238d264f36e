"""Schedules against Psyche's own test values and against its equations in float64."""

import math

import jax
import jax.numpy as jnp
import pytest

from pipeline import runfile
from pipeline.optim import schedules

WARMUP = {"base_lr": 0.01, "warmup_steps": 10, "warmup_init_lr": 0.001}
CONSTANT = runfile.ScheduleConstant(**WARMUP)
LINEAR = runfile.ScheduleLinear(**WARMUP, total_steps=110, final_lr=0.0)
COSINE = runfile.ScheduleCosine(**WARMUP, total_steps=110, final_lr=0.0)
WSD = runfile.ScheduleWarmupStableDecay(
    **WARMUP,
    stable_steps=60,
    cosine_decay_steps=110,
    cosine_decay_final_lr=0.001,
    linear_decay_steps=20,
    linear_decay_final_lr=0.0,
)
ALL = {"constant": CONSTANT, "linear": LINEAR, "cosine": COSINE, "wsd": WSD}


def reference(schedule, step: int) -> float:
    """Psyche's equations, in Python's float64; Cosine stays at its end."""
    base, warmup = schedule.base_lr, schedule.warmup_steps
    if step < warmup:
        rise = base - schedule.warmup_init_lr
        return schedule.warmup_init_lr + rise * (step / warmup)
    match schedule:
        case runfile.ScheduleConstant():
            return base
        case runfile.ScheduleLinear(total_steps=total, final_lr=final):
            if step >= total:
                return final
            return base + (final - base) * ((step - warmup) / (total - warmup))
        case runfile.ScheduleCosine(total_steps=total, final_lr=final):
            progress = min((step - warmup) / (total - warmup), 1.0)
            return final + (base - final) * 0.5 * (1 + math.cos(math.pi * progress))
    flat = warmup + schedule.stable_steps
    curve = flat + schedule.cosine_decay_steps
    middle, last = schedule.cosine_decay_final_lr, schedule.linear_decay_final_lr
    if step < flat:
        return base
    if step < curve:
        progress = (step - flat) / schedule.cosine_decay_steps
        return middle + (base - middle) * 0.5 * (1 + math.cos(math.pi * progress))
    if step < curve + schedule.linear_decay_steps:
        return middle - (middle - last) * ((step - curve) / schedule.linear_decay_steps)
    return last


@pytest.mark.parametrize(
    ("schedule", "step", "learning_rate"),
    [
        (COSINE, 0, 0.001),
        (COSINE, 5, 0.0055),
        (COSINE, 10, 0.01),
        (COSINE, 60, 0.005),
        (COSINE, 110, 0.0),
        (LINEAR, 60, 0.005),
        (LINEAR, 110, 0.0),
        (CONSTANT, 10, 0.01),
        (CONSTANT, 10**6, 0.01),
        (WSD, 69, 0.01),
        (WSD, 125, 0.0055),
        (WSD, 180, 0.001),
        (WSD, 190, 0.0005),
        (WSD, 200, 0.0),
        (WSD, 10**6, 0.0),
    ],
)
def test_schedule_gives_psyches_values(schedule, step, learning_rate):
    assert float(schedules.make(schedule)(step)) == pytest.approx(learning_rate, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_schedule_agrees_with_its_equation_at_every_step(name):
    steps = range(0, 250)
    got = jax.jit(schedules.make(ALL[name]))(jnp.arange(len(steps), dtype=jnp.int32))
    expected = [reference(ALL[name], step) for step in steps]
    assert got.dtype == jnp.float32
    assert got.tolist() == pytest.approx(expected, rel=2e-6, abs=2e-9)


@pytest.mark.parametrize("name", ALL)
def test_schedule_is_the_same_for_python_and_traced_steps(name):
    schedule = schedules.make(ALL[name])
    traced = jax.jit(schedule)
    for step in (0, 1, 9, 10, 11, 100, 150, 300):
        value = schedule(step)
        assert (value.dtype, value.shape) == (jnp.float32, ())
        assert float(value) == pytest.approx(float(traced(jnp.int32(step))), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_schedule_without_warmup_starts_at_its_base(name):
    schedule = ALL[name].model_copy(update={"warmup_steps": 0})
    assert float(schedules.make(schedule)(0)) == pytest.approx(0.01)


def test_cosine_stays_at_its_end_where_psyches_rises_again():
    schedule = schedules.make(COSINE.model_copy(update={"final_lr": 0.002}))
    psyches = 0.002 + 0.008 * 0.5 * (1 + math.cos(math.pi * 2))
    assert psyches == pytest.approx(0.01)  # step 210 is p = 2
    assert [float(schedule(step)) for step in (110, 160, 210)] == pytest.approx([0.002] * 3)


def test_stretch_of_no_steps_is_skipped():
    no_curve = WSD.model_copy(update={"cosine_decay_steps": 0})
    assert float(schedules.make(no_curve)(70)) == pytest.approx(0.001)
    no_line = WSD.model_copy(update={"linear_decay_steps": 0})
    assert float(schedules.make(no_line)(180)) == 0.0


def test_steps_beyond_int32_are_taken():
    assert float(schedules.make(LINEAR)(3_000_000_000)) == 0.0
    endless = LINEAR.model_copy(update={"total_steps": 4_000_000_000})
    assert float(schedules.make(endless)(jnp.int32(2_000_000_000))) == pytest.approx(
        0.005, rel=1e-5
    )


def test_cold_start_rises_from_nothing_and_ends():
    warmed = schedules.cold_start(schedules.make(CONSTANT), 100, 20)
    got = [float(warmed(step)) for step in (99, 100, 101, 110, 120, 121)]
    assert got == pytest.approx([0.01, 0.0, 0.0005, 0.005, 0.01, 0.01])
    assert float(jax.jit(warmed)(jnp.int32(110))) == pytest.approx(0.005)


def test_cold_start_of_no_steps_changes_nothing():
    schedule = schedules.make(CONSTANT)
    assert schedules.cold_start(schedule, 100, 0) is schedule
