"""What commands share: the word of a reader."""

import random

import pytest

from pipeline.command_options import check_word
from tests.errors import refused


@pytest.mark.parametrize("digits", [16, 32, 64])
def test_what_a_generator_prints_is_taken(digits):
    generator = random.Random(digits)
    for _ in range(200):
        check_word(f"{generator.randrange(16**digits):0{digits}x}")
    check_word("7C9E6679-7425-40DE-944B-E07FC1F90AE7")  # a UUID


@pytest.mark.parametrize(
    "word",
    [
        *("", " ", "mine", "lockstep", "a reader's word", "correct horse battery staple " * 9),
        *("5f0c1e9a7d3b824", "3141592653589793", "deadbeefdecafbad", "\uff18" * 20),
        *("0" * 64, "0123456789abcdef", "1234567890abcdef" * 2, "f0" * 20, "8badf00d" * 4),
        *("a1b2c3d4e5f60718", "deadbeef00000000", "20261129" * 4, "5f0c1e9a" * 4, "-" * 64),
        *("5f0c1e9a" * 3 + "5f0c1e9b", "5f0c1e9ad4" * 2, "5f0c1e9ad4b75f0c1e8ad4b7"),
        *("2026-11-29-14-33-34-123456789", "1796000000123456789" * 2, "271828182845904523536028"),
        *("00000000-0000-4000-8000-00000000000a", "f" * 40 + "1", "0f" * 9 + "0123456789abcdef"),
    ],
)
def test_a_word_that_is_short_or_follows_a_pattern_is_refused(word):
    with refused("--seed", "expected 16 or more", "openssl rand -hex 16"):
        check_word(word)
