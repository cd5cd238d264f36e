"""A value far beyond the others' is no message, and nobody is beyond for what a few others send."""

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim.compressed.compressor import Coefficients, SomeBlocks
from lockstep.wire.bound import TIMES, beyond, largest, largest_in_program

PLACES = np.zeros((1, 2), np.uint8)
FLAGS = np.float32([2**24 - 1])
MOST = 3.4e38


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"a": np.float32([1, -3e38]), "b": np.float32([2])}, float(np.float32(3e38))),
        ({"a": np.float16([4]), "b": np.uint8([200])}, 4.0),
        ({"a": Coefficients(PLACES, np.array([[0.5, -2]], bfloat16))}, 2.0),
        ({"a": Coefficients(PLACES, np.array([[True, False]]))}, 0.0),
        ({"a": SomeBlocks(FLAGS, Coefficients(PLACES, np.array([[0.5, 0]], bfloat16)))}, 0.5),
        ({"a": np.zeros(0, np.float32)}, 0.0),
    ],
    ids=["whole", "codes", "values", "signs", "flags", "empty"],
)
def test_the_largest_value_is_of_neither_places_nor_codes_nor_flags(message, expected):
    assert largest(message) == expected
    assert float(jax.jit(largest_in_program)(message)) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_a_value_that_is_not_finite_shows_wherever_it_is(value, dtype):
    values = np.full(1001, -2, dtype)
    values[700] = value
    messages = {"a": values}, {"a": values[:2], "b": Coefficients(PLACES, values[699:701][None])}
    for message in messages:
        assert not np.isfinite(jax.jit(largest_in_program)(message))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([MOST], []),  # whoever is alone is the measure
        ([0.0] * 4, []),
        ([0.1, MOST], [1]),
        ([0.0, 0.0, 0.0, MOST], [3]),  # as in a first round without a learning rate
        ([2.0, MOST, MOST, 3.0], [1, 2]),
        ([MOST] * 4, []),  # all diverge together
        ([1e-30] * 5 + [TIMES], []),  # a majority of tiny values harms nobody
        ([10.0, 10.0, 10.0 * TIMES, 10.1 * TIMES], [3]),
        ([10.0, 10.0, 20.0, 11 * TIMES, 21 * TIMES], [4, 3]),  # who is left is looked at again
    ],
    ids=lambda value: None,
)
def test_who_is_beyond_the_others(sizes, expected):
    found = beyond(dict(enumerate(sizes)))
    assert list(found) == expected
    rest = {peer: size for peer, size in enumerate(sizes) if peer not in found}
    assert not beyond(rest)  # so an audit of what is left finds nobody else


def test_what_is_beyond_names_the_value_and_the_bound():
    assert beyond({0: 3.0, 1: 3.0, 2: 3e38})[2].startswith(
        "a value of 3e+38, expected at most 3.15"
    )
