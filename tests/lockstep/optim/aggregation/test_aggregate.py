"""What becomes of the values of several peers."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import EQUAL_MEAN, equally, mean, median
from tests.lockstep.optim.aggregates import vote

VALUES = {"w": jnp.array([[[1.0, 2.0]], [[4.0, -1.0]], [[jnp.nan, jnp.inf]], [[4.0, 5.0]]])}
ABSENT = jnp.int32([3, 1, 0, 2])  # the third


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (mean, [(3 * 1 + 4 + 2 * 4) / 6, (3 * 2 - 1 + 2 * 5) / 6]),
        (EQUAL_MEAN, [3, 2]),
        (median, [4, 2]),
        (equally(median), [4, 2]),
        (vote, [1, 1]),
    ],
)
def test_each_is_of_those_that_are_there(aggregate, expected):
    np.testing.assert_allclose(aggregate(VALUES, ABSENT)["w"], [expected], rtol=1e-6)


@pytest.mark.parametrize("aggregate", [mean, EQUAL_MEAN, median, vote])
def test_an_element_that_nobody_sent_is_zero(aggregate):
    sent = jnp.array([[[True, False]], [[True, False]], [[False, False]], [[False, False]]])
    found = aggregate(VALUES, sent)["w"]
    assert found.shape == (1, 2) and found[0, 1] == 0
    assert found[0, 0] == (1 if aggregate is vote else 2.5)
    assert not aggregate(VALUES, 0 * ABSENT)["w"].any()
