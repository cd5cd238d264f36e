"""The batch ramp: Psyche's numbers, and the sequences of a whole run."""

from decimal import ROUND_HALF_UP, Decimal

import pytest

from pipeline import runfile
from tests.pipeline.runfile.edited_run import CONSILIENCE, load


def test_batch_ramp_gives_psyches_numbers():
    ramp = runfile.CurrentConfig.model_validate(CONSILIENCE["config"])
    tokens = (0, 2**37, 2**38, 2**39 - 1, 2**39, 2**62)
    sizes = [ramp.batch_size(count) for count in tokens]
    assert sizes == [12288, 17408, 22528, 32768, 32768, 32768]


def test_batch_ramp_rounds_half_away_from_zero():
    ramp = load().config  # 4 -> 8 over 1000 tokens
    assert [ramp.batch_size(tokens) for tokens in (124, 125, 374, 375, 624, 625)] == [
        4, 5, 5, 6, 6, 7,
    ]  # fmt: skip


def test_batch_ramp_agrees_with_exact_arithmetic():
    ramp = load(
        ("config.global_batch_size_start", 3),
        ("config.global_batch_size_end", 61),
        ("config.global_batch_size_warmup_tokens", 4096),
    ).config
    for tokens in range(0, 5000, 7):
        exact = 3 + Decimal(58 * min(tokens, 4096)) / 4096
        assert ramp.batch_size(tokens) == int(exact.to_integral_value(ROUND_HALF_UP))


def test_no_ramp_is_the_end_from_the_start():
    assert load(("config.global_batch_size_warmup_tokens", 0)).config.batch_size(0) == 8


@pytest.mark.parametrize(("warmup", "first", "index"), [(0, 0, 0), (3_000, 0, 0), (90_000, 7, 33)])
def test_sequences_of_a_run_are_those_of_its_rounds_one_by_one(warmup, first, index):
    config = load(
        ("config.global_batch_size_start", 3),
        ("config.global_batch_size_end", 61),
        ("config.global_batch_size_warmup_tokens", warmup),
        ("config.total_steps", 200),
    ).config
    counted = index
    for _ in range(first, 200):
        counted += config.batch_size(counted * 16)
    assert config.last_index(16, first, index) == counted


def test_sequences_of_an_endless_run_are_counted_in_no_time():
    config = load(
        ("config.global_batch_size_end", 60_000),
        ("config.global_batch_size_warmup_tokens", 2**54),
        ("config.total_steps", 2**32 - 1),
    ).config
    assert 4 * (2**32 - 1) < config.last_index(2048) < 60_000 * (2**32 - 1)
