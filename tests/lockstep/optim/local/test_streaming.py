"""Streaming DiLoCo against NumPy float64, local step by local step, written from the equations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.dense import adamw, sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.local.streaming import decoupled_diloco, streaming_diloco
from lockstep.optim.optimizer import align_before
from lockstep.optim.transform import lookahead_params
from tests.lockstep.optim.compiled import Peers
from tests.lockstep.optim.quadratic import PEERS, START, TARGETS, begin, step

RATE = 0.1
INNER = adamw(RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=2.0)
OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True)
streaming_of = partial(streaming_diloco, sgd(RATE, momentum=0.5), OUTER)


# the 24 elements in 5 fragments: 5 in each, and 4 in the last
@pytest.mark.long
@pytest.mark.parametrize(
    "fragments, steps, delay, mixing", [(5, 2, 1, 0.25), (3, 3, 2, 0.0), (2, 2, 0, 0.5)]
)
def test_every_local_step_is_the_equations(fragments, steps, delay, mixing):
    optimizer = streaming_of(
        inner_steps=fragments * steps, fragments=fragments, delay=delay, mixing=mixing
    )
    params, state = begin(optimizer)
    theta = START.astype(np.float64).ravel()
    outer, trace = np.zeros_like(theta), np.zeros((PEERS, theta.size))
    mine = np.stack([theta] * PEERS)
    ranges = np.array_split(np.arange(-(-theta.size // fragments) * fragments), fragments)
    sent = None
    for t in range(2 * fragments + 2):
        for h in range(steps):
            if sent is not None and h == delay:
                mine[:, sent] = mixing * mine[:, sent] + (1 - mixing) * theta[sent]
            found = jax.vmap(partial(lookahead_params, optimizer, params))(state)["w"]
            np.testing.assert_allclose(found.reshape(PEERS, -1), mine, rtol=0, atol=3e-6)
            trace = 0.5 * trace + mine - TARGETS.reshape(PEERS, -1)
            mine = mine - RATE * trace
            params, state = step(optimizer, params, state)
        sent = [at for at in ranges[t % fragments] if at < theta.size]
        pseudogradient = theta[sent] - mine[:, sent].mean(axis=0)
        outer[sent] = 0.6 * outer[sent] + pseudogradient
        theta[sent] -= 0.7 * (pseudogradient + 0.6 * outer[sent])
        np.testing.assert_allclose(params["w"].ravel(), theta, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "make", [partial(streaming_diloco, mixing=0.0), partial(decoupled_diloco, adopt="carry")]
)
def test_one_fragment_without_delay_is_diloco(make):
    one = make(INNER, OUTER, inner_steps=3, fragments=1, delay=0)
    found, expected = begin(one), begin(other := diloco(INNER, OUTER, inner_steps=3))
    for _ in range(4 * 3):
        found, expected = step(one, *found), step(other, *expected)
        np.testing.assert_allclose(found[0]["w"], expected[0]["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_peer_that_sits_out_rounds_sends_nothing_twice(fragments):
    """Another peer takes all local steps; this one moves in round 1 alone, then stays and sits."""
    settings = {"inner_steps": fragments, "fragments": fragments, "delay": 0, "mixing": 0.0}
    peers = Peers(streaming_diloco(sgd(1.0), OUTER, **settings), {"w": jnp.array(START)})
    still = jax.tree.map(jnp.zeros_like, peers.params)
    for t in range(1, 3 * fragments + 4):
        peers.align(0, t)
        trains = t not in (2, 3, fragments + 3)
        if trains:
            grads = {"w": jnp.ones((6, 4))} if t == 1 else still
            peers.accumulate(0, grads, t)
            message = peers.send(0, t)
            if t > fragments:  # what it moved was sent, each fragment once
                assert not jnp.any(message["w"]), t
        peers.receive([message], t, [int(trains)])


def test_local_steps_are_counted_exactly_in_long_runs():
    """A float32 of so many rounds does not tell hundredths apart."""
    optimizer = streaming_of(inner_steps=200, fragments=2, delay=3, mixing=0.0)
    params = {"w": jnp.array(START)}
    own = optimizer.init(jax.tree.map(jnp.zeros_like, params))[0]
    for t in (66_144, 16_777_217):
        found = [
            bool(align_before(optimizer, own, params, jnp.int32(t), jnp.int32(h)).local["w"].any())
            for h in range(6)
        ]
        assert found == [False, False, False, True, False, False]


# ---- Decoupled: with nobody late it is Streaming DiLoCo; what a peer keeps of its own steps ----


@pytest.mark.parametrize("adopt, mixing", [("overwrite", 0.0), ("blend", 0.25)])
def test_with_nobody_late_it_is_streaming_diloco_bit_for_bit(adopt, mixing):
    settings = {"inner_steps": 6, "fragments": 2, "delay": 1}
    one = decoupled_diloco(INNER, OUTER, **settings, adopt=adopt, mixing=mixing)
    other = streaming_diloco(INNER, OUTER, **settings, mixing=mixing)
    found, expected = begin(one), begin(other)
    for _ in range(5 * 3):
        found, expected = step(one, *found), step(other, *expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def alone(adopt: str, delay: int, fragments: int = 2) -> tuple[float, float]:
    """What a lone peer has moved in all of its local steps, each by 1, and the params with it,
    after rounds of 3 local steps; nothing follows the last."""
    settings = {"inner_steps": 3 * fragments, "fragments": fragments, "delay": delay}
    optimizer = decoupled_diloco(sgd(1.0), outer_sgd(1.0), **settings, adopt=adopt)
    peers = Peers(optimizer, {"w": jnp.array(START)})
    rounds = 5 * fragments
    for t in range(1, rounds + 1):
        for h in range(3):
            if h == delay:
                peers.align(0, t)
            grads = {"w": jnp.full((6, 4), -1.0 if t <= rounds - fragments else 0.0)}
            peers.accumulate(0, grads, t)
        peers.receive([peers.send(0, t)], t)
    moved = peers.params["w"] - START
    return float(moved.min()), float(moved.max())


@pytest.mark.long
def test_carry_loses_no_local_step_that_is_taken_while_a_fragment_travels():
    taken = 3.0 * 8  # local steps of the rounds in which it moves
    assert alone("carry", delay=2) == pytest.approx((taken, taken), abs=1e-4)
    assert alone("overwrite", delay=0) == pytest.approx((taken, taken), abs=1e-4)
    assert alone("overwrite", delay=2)[1] < taken - 2  # two steps, whenever one was taken up


def test_what_a_late_message_holds_is_not_sent_again():
    """It sends in round 1, and takes up rounds 1 and 2 without it before it trains again."""
    settings = {"inner_steps": 1, "fragments": 1, "delay": 0, "adopt": "carry"}
    peers = Peers(decoupled_diloco(sgd(1.0), outer_sgd(1.0), **settings), {"w": jnp.array(START)})
    peers.accumulate(0, {"w": jnp.ones((6, 4))}, 1)
    first = peers.send(0, 1)
    for t in (2, 3):
        peers.align(0, t)
    assert not np.any(peers.own[0].optimizer.local["w"] - peers.params["w"])
    second = peers.send(0, 3)
    assert np.any(first["w"]) and not np.any(second["w"])
