"""Streaming DiLoCo against NumPy float64, local step by local step, written from the equations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.dense import adamw, sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.local.streaming import streaming_diloco
from lockstep.optim.optimizer import RoundPeers, align, align_before
from lockstep.optim.transform import lookahead_params
from lockstep.transcript.trees import load_tree, save_tree
from lockstep.wire import message as wire
from tests.lockstep.optim.compiled import compiled
from tests.lockstep.optim.local.quadratic import PEERS, START, TARGETS, begin, step

RATE = 0.1
OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True)
streaming_of = partial(streaming_diloco, sgd(RATE, momentum=0.5), OUTER)


# the 24 elements in 5 fragments: 5 in each, and 4 in the last
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


def test_what_was_saved_before_an_exchange_arrived_goes_on_to_the_same_bits(tmp_path):
    optimizer = streaming_of(inner_steps=6, fragments=2, delay=2, mixing=0.25)
    params, state = begin(optimizer)
    for count in range(9):
        if count == 4:  # a local step after the first exchange, and before the next takes it up
            save_tree(tmp_path / "state", (params, state))
        params, state = step(optimizer, params, state)
    again = load_tree(tmp_path / "state", (params, state))
    for _ in range(5):
        again = step(optimizer, *again)
    jax.tree.map(np.testing.assert_array_equal, again, (params, state))


def test_one_fragment_without_delay_is_diloco():
    inner = adamw(RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=2.0)
    one = streaming_diloco(inner, OUTER, inner_steps=3, fragments=1, delay=0, mixing=0.0)
    found, expected = begin(one), begin(other := diloco(inner, OUTER, inner_steps=3))
    for _ in range(4 * 3):
        found, expected = step(one, *found), step(other, *expected)
        np.testing.assert_allclose(found[0]["w"], expected[0]["w"], rtol=0, atol=1e-6)


def test_a_message_is_the_pseudogradient_of_the_fragment_of_the_round():
    optimizer = compiled(streaming_of(inner_steps=4, fragments=4, delay=0, mixing=0.0))
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    form = wire.form_of(optimizer, params, "lockstep")
    for t in range(1, 10):
        own = align(optimizer, own, params, t)
        here = optimizer.lookahead(params, own, shared, t)
        own = optimizer.accumulate({"w": here["w"] - TARGETS[0]}, own, params, t)
        message, after = optimizer.send(own, params, shared, t)
        at = slice((t - 1) % 4 * 6, (t - 1) % 4 * 6 + 6)
        expected = (params["w"] - own.local["w"]).ravel()[at]
        np.testing.assert_allclose(message["w"], expected, atol=1e-6)
        assert float(optax.tree.norm(message)) > 0.02  # also in later exchanges of a fragment
        distance, compared = optimizer.compare(own, message, params, t)
        assert float(distance) == 0
        jax.tree.map(np.testing.assert_array_equal, compared, after)
        data = wire.encode(jax.device_get(message), form)
        assert len(data) == wire.HEADER.size + 4 * 6
        received = jax.tree.map(lambda x: x[None], message)
        updates, shared = optimizer.receive(
            received, RoundPeers.synchronous(jnp.int32([1])), params, shared, t
        )
        assert not updates["w"].ravel()[: at.start].any()
        assert not updates["w"].ravel()[at.stop :].any()
        params, own = jax.tree.map(jnp.add, params, updates), after


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_peer_that_sits_out_rounds_sends_nothing_twice(fragments):
    """Another peer takes all local steps; this one moves in round 1 alone, then stays and sits."""
    optimizer = compiled(
        streaming_diloco(
            sgd(1.0), OUTER, inner_steps=fragments, fragments=fragments, delay=0, mixing=0.0
        )
    )
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    still = jax.tree.map(jnp.zeros_like, params)
    for t in range(1, 3 * fragments + 4):
        own = align(optimizer, own, params, t)
        trains = t not in (2, 3, fragments + 3)
        if trains:
            grads = {"w": jnp.ones((6, 4))} if t == 1 else still
            own = optimizer.accumulate(grads, own, params, t)
            message, own = optimizer.send(own, params, shared, t)
            if t > fragments:  # what it moved was sent, each fragment once
                assert not jnp.any(message["w"]), t
        weight = jnp.int32([1 if trains else 0])
        received = jax.tree.map(lambda x: x[None], message)
        updates, shared = optimizer.receive(
            received, RoundPeers.synchronous(weight), params, shared, t
        )
        params = jax.tree.map(jnp.add, params, updates)


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
