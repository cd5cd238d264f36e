"""Decoupled DiLoCo with nobody late is Streaming DiLoCo; and what a peer keeps of its own steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import rda
from lockstep.optim.dense import adamw, sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.local.outer_steps import delayed_nesterov
from lockstep.optim.local.streaming import decoupled_diloco, streaming_diloco
from lockstep.optim.optimizer import RoundPeers, align
from tests.lockstep.optim.compiled import compiled
from tests.lockstep.optim.local.quadratic import START, begin, step

INNER = adamw(0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True, aggregate=rda)


@pytest.mark.parametrize("adopt, mixing", [("overwrite", 0.0), ("blend", 0.25)])
def test_with_nobody_late_it_is_streaming_diloco_bit_for_bit(adopt, mixing):
    settings = {"inner_steps": 6, "fragments": 2, "delay": 1}
    one = decoupled_diloco(INNER, OUTER, **settings, adopt=adopt, mixing=mixing)
    other = streaming_diloco(INNER, OUTER, **settings, mixing=mixing)
    found, expected = begin(one), begin(other)
    for _ in range(5 * 3):
        found, expected = step(one, *found), step(other, *expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_one_fragment_without_delay_is_diloco_however_it_is_taken_up():
    for adopt in ("overwrite", "carry"):
        one = decoupled_diloco(INNER, OUTER, inner_steps=3, fragments=1, delay=0, adopt=adopt)
        found, expected = begin(one), begin(other := diloco(INNER, OUTER, inner_steps=3))
        for _ in range(4 * 3):
            found, expected = step(one, *found), step(other, *expected)
            np.testing.assert_allclose(found[0]["w"], expected[0]["w"], rtol=0, atol=1e-6)


def alone(adopt: str, delay: int, fragments: int = 2) -> tuple[float, float]:
    """What a lone peer has moved in all of its local steps, each by 1, and the params with it,
    after rounds of 3 local steps; nothing follows the last."""
    optimizer = compiled(
        decoupled_diloco(
            sgd(1.0), outer_sgd(1.0),
            inner_steps=3 * fragments, fragments=fragments, delay=delay, adopt=adopt,
        )
    )  # fmt: skip
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    rounds = 5 * fragments
    for t in range(1, rounds + 1):
        for h in range(3):
            if h == delay:
                own = align(optimizer, own, params, t)
            grads = {"w": jnp.full((6, 4), -1.0 if t <= rounds - fragments else 0.0)}
            own = optimizer.accumulate(grads, own, params, t)
        message, own = optimizer.send(own, params, shared, t)
        received = jax.tree.map(lambda x: x[None], message)
        updates, shared = optimizer.receive(
            received, RoundPeers.synchronous(jnp.int32([1])), params, shared, t
        )
        params = jax.tree.map(jnp.add, params, updates)
    moved = params["w"] - START
    return float(moved.min()), float(moved.max())


def test_carry_loses_no_local_step_that_is_taken_while_a_fragment_travels():
    taken = 3.0 * 8  # local steps of the rounds in which it moves
    assert alone("carry", delay=2) == pytest.approx((taken, taken), abs=1e-4)
    assert alone("overwrite", delay=0) == pytest.approx((taken, taken), abs=1e-4)
    assert alone("overwrite", delay=2)[1] < taken - 2  # two steps, whenever one was taken up


def test_what_a_late_message_holds_is_not_sent_again():
    """It sends in round 1, and takes up rounds 1 and 2 without it before it trains again."""
    optimizer = compiled(
        decoupled_diloco(
            sgd(1.0), outer_sgd(1.0), inner_steps=1, fragments=1, delay=0, adopt="carry"
        )
    )
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    own = optimizer.accumulate({"w": jnp.ones((6, 4))}, own, params, 1)
    first, own = optimizer.send(own, params, shared, 1)
    for t in (2, 3):
        own = align(optimizer, own, params, t)
    assert not np.any(own.optimizer.local["w"] - params["w"])
    second, _ = optimizer.send(own, params, shared, 3)
    assert np.any(first["w"]) and not np.any(second["w"])


def test_a_setting_that_cannot_be_is_named():
    make = partial(decoupled_diloco, sgd(1), delayed_nesterov(1, momentum=0.5, every=2))
    with pytest.raises(ValueError, match="adopt is 'keep', expected one of overwrite, blend, car"):
        make(inner_steps=2, fragments=1, delay=0, adopt="keep")
    with pytest.raises(ValueError, match="inner_steps is 3, expected a multiple of 2"):
        make(inner_steps=3, fragments=2, delay=0, adopt="carry")
