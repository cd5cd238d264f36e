"""Schedules against Psyche's own test values, and between them against its equations."""

import math

import jax
import jax.numpy as jnp
import pytest

from lockstep.optim import schedules

CONSTANT = {"base_lr": 0.01, "warmup_steps": 10, "warmup_init_lr": 0.001}
FALLING = CONSTANT | {"total_steps": 110, "final_lr": 0.0}
SETTINGS = {
    "constant": CONSTANT,
    "linear": FALLING,
    "cosine": FALLING,
    "warmup_stable_decay": CONSTANT
    | {
        "stable_steps": 60,
        "cosine_decay_steps": 110,
        "cosine_decay_final_lr": 0.001,
        "linear_decay_steps": 20,
        "linear_decay_final_lr": 0.0,
    },
}
each_schedule = pytest.mark.parametrize("name", SETTINGS)


def make(name: str, **changes) -> schedules.LearningRate:
    return getattr(schedules, name)(**SETTINGS[name] | changes)


@pytest.mark.parametrize(
    ("name", "step", "learning_rate"),
    [
        ("cosine", 0, 0.001),
        ("cosine", 5, 0.0055),
        ("cosine", 10, 0.01),
        ("cosine", 35, 0.005 * (1 + math.sqrt(0.5))),
        ("cosine", 60, 0.005),
        ("cosine", 110, 0.0),
        ("linear", 35, 0.0075),
        ("linear", 110, 0.0),
        ("constant", 9, 0.0091),
        ("constant", 10, 0.01),
        ("constant", 10**6, 0.01),
        ("warmup_stable_decay", 5, 0.0055),
        ("warmup_stable_decay", 69, 0.01),
        ("warmup_stable_decay", 92, 0.001 + 0.0045 * (1 + math.cos(0.2 * math.pi))),
        ("warmup_stable_decay", 125, 0.0055),
        ("warmup_stable_decay", 180, 0.001),
        ("warmup_stable_decay", 190, 0.0005),
        ("warmup_stable_decay", 200, 0.0),
        ("warmup_stable_decay", 10**6, 0.0),
    ],
)
def test_schedule_gives_psyches_values(name, step, learning_rate):
    found = make(name)(step)
    assert (found.dtype, found.shape) == (jnp.float32, ())
    assert float(found) == pytest.approx(learning_rate, rel=1e-6, abs=1e-9)


@each_schedule
def test_schedule_without_warmup_starts_at_its_base(name):
    assert float(make(name, warmup_steps=0)(0)) == pytest.approx(0.01)


def test_cosine_stays_at_its_end_where_psyches_rises_again():
    """To 0.01 at step 210, where p is 2."""
    schedule = make("cosine", final_lr=0.002)
    assert [float(schedule(step)) for step in (110, 160, 210)] == pytest.approx([0.002] * 3)


def test_stretch_of_no_steps_is_skipped():
    assert float(make("warmup_stable_decay", cosine_decay_steps=0)(70)) == pytest.approx(0.001)
    assert float(make("warmup_stable_decay", linear_decay_steps=0)(180)) == 0.0


def test_steps_beyond_int32_are_taken():
    assert float(make("linear")(3_000_000_000)) == 0.0
    endless = make("linear", total_steps=4_000_000_000)
    assert float(endless(jnp.int32(2_000_000_000))) == pytest.approx(0.005, rel=1e-5)


def test_cold_start_rises_from_nothing_and_ends():
    warmed = schedules.cold_start(make("constant"), 100, 20)
    got = [float(warmed(step)) for step in (99, 100, 101, 110, 120, 121)]
    assert got == pytest.approx([0.01, 0.0, 0.0005, 0.005, 0.01, 0.01])
    assert float(jax.jit(warmed)(jnp.int32(110))) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("local_steps", "first_round", "second_round"),
    [(1, [0], [1]), (5, [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]), (10, range(10), range(10, 20))],
)
def test_cold_start_begins_with_the_first_local_step(local_steps, first_round, second_round):
    """Of round 101; each local step adds as much, up to the last one of round 105."""
    warmed = schedules.cold_start(jnp.ones_like, 101, 4, local_steps)
    highest = 5 * local_steps - 1  # at rate 1

    def rates(round_: int) -> list[float]:
        return [
            highest * float(warmed(jnp.float32(round_ - 1 + (h + 1) / local_steps)))
            for h in range(local_steps)
        ]

    assert rates(101) == pytest.approx(list(first_round), abs=1e-3)
    assert rates(102) == pytest.approx(list(second_round), abs=1e-3)
    assert rates(105)[-1] == highest
    assert rates(100)[-1] == rates(106)[0] == rates(200)[0] == highest


def test_cold_start_of_no_steps_changes_nothing():
    schedule = make("constant")
    assert schedules.cold_start(schedule, 100, 0) is schedule
