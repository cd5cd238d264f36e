"""SPARTA-DiLoCo against NumPy float64, which averages local params at places and in fragments."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.local.sparta import sparta, sparta_diloco
from lockstep.wire import message as wire
from tests.lockstep.optim.local.test_sparta import (
    INNER,
    PEERS,
    RATE,
    SHARE,
    START,
    STEPS,
    TARGETS,
    Peers,
    places,
)

OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True)
SPARSE = sparta(INNER, inner_steps=STEPS, share=SHARE, seed=3)
optimizer_of = partial(sparta_diloco, SPARSE, OUTER)


@pytest.mark.parametrize("every", [2, 4])  # of 30 elements, ranges of 15; of 8, 8, 8 and 6
def test_every_round_is_the_equations(every):
    peers = Peers(optimizer_of(outer_every=every))
    theta = START.astype(np.float64).ravel()
    anchor, trace = theta.copy(), np.zeros_like(theta)
    local = np.stack([theta] * PEERS)
    momentum = np.zeros_like(local)
    targets = TARGETS.astype(np.float64).reshape(PEERS, -1)
    ranges = np.array_split(np.arange(-(-theta.size // every) * every), every)
    for step in range(1, 2 * every + 3):
        present = [True, step != 3, True]
        sent = peers.round(step, present)
        for _ in range(STEPS):
            momentum = 0.5 * momentum + local - targets
            local = local - RATE * momentum
        at = places(step, theta.size)
        part = [place for place in ranges[(step - 1) % every] if place < theta.size]
        for message, mine in zip(sent, local, strict=True):
            np.testing.assert_allclose(message.places["w"], theta[at] - mine[at], atol=2e-6)
            far = theta[part] - mine[part]
            np.testing.assert_allclose(message.fragment["w"][: len(part)], far, atol=2e-6)
        mean = local[present].mean(axis=0)
        theta[at] = mean[at]
        pseudogradient = anchor[part] - mean[part]
        trace[part] = 0.6 * trace[part] + pseudogradient
        theta[part] = anchor[part] - 0.7 * (pseudogradient + 0.6 * trace[part])
        anchor[part] = theta[part]
        for places_ in (at, part):
            local[:, places_] = theta[places_]
        np.testing.assert_allclose(peers.params["w"].ravel(), theta, rtol=0, atol=3e-6)
        for peer in range(PEERS):
            np.testing.assert_allclose(peers.local(peer, step).ravel(), local[peer], atol=3e-6)


def test_an_outer_step_in_every_round_is_diloco():
    every = Peers(optimizer_of(outer_every=1))
    whole = Peers(diloco(INNER, OUTER, inner_steps=STEPS))
    for step in range(1, 5):
        for peers in (every, whole):
            peers.round(step, [True, True, False])
        np.testing.assert_allclose(every.params["w"], whole.params["w"], rtol=0, atol=2e-6)


def test_a_message_has_a_share_of_the_elements_and_a_fragment():
    optimizer = optimizer_of(outer_every=4)
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    message, _ = jax.jit(optimizer.send)(own, params, shared, 1)
    form = wire.form_of(optimizer, params, "lockstep")
    data = wire.encode(jax.device_get(message), form)
    assert len(data) == wire.HEADER.size + 4 * (9 + 8)
    jax.tree.map(np.testing.assert_array_equal, wire.decode(data, form), message)
