"""SPARTA, and with DiLoCo's outer steps, against NumPy float64, which averages local params."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.dense import sgd
from lockstep.optim.local.local_steps import outer_sgd
from lockstep.optim.local.sparta import sparta, sparta_diloco
from lockstep.optim.optimizer import Optimizer, RoundPeers
from lockstep.wire import message as wire
from tests.lockstep.optim.compiled import Peers

PEERS, STEPS, RATE, SHARE = 3, 2, 0.1, 0.3
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 5, 6)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
INNER = sgd(RATE, momentum=0.5)
OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True)
optimizer_of = partial(sparta, INNER, inner_steps=STEPS, seed=3)


def places(step: int, size: int) -> list[int]:
    """One of each part, drawn by JAX's generator one at a time from bounds written out."""
    key = jax.random.fold_in(jax.random.key(3), step)
    count = round(SHARE * size)
    widths = [size // count + (part < size % count) for part in range(count)]
    drawn = jax.random.randint(jax.random.fold_in(key, 0), (count,), 0, np.array(widths))
    return [sum(widths[:part]) + int(place) for part, place in enumerate(drawn)]


def test_the_places_of_a_seed_and_a_round_are_these():
    """A change here is another run: each message means something else."""
    assert places(1, 30) == [1, 6, 10, 13, 16, 20, 21, 24, 29]
    assert places(2, 30) == [2, 4, 9, 12, 17, 18, 21, 25, 27]


@pytest.mark.parametrize("selector", ["shuffled", "partitioned"])
@pytest.mark.parametrize("share, rounds", [(0.2, 5), (0.3, 12)])  # parts of 5; of 3 and of 4
def test_each_element_has_its_turn_as_often_as_its_neighbours(selector, share, rounds):
    optimizer = optimizer_of(share=share, selector=selector)
    params = {"w": jnp.zeros(TARGETS[0].shape)}
    message = jax.tree.map(lambda x: 1 + x[None], optimizer_message(optimizer, params))
    receive = jax.jit(optimizer.receive)
    chosen = [
        np.flatnonzero(
            receive(
                message, RoundPeers.synchronous(jnp.int32([1])), params, optax.EmptyState(), step
            )[0]["w"]
        )
        for step in range(1, 2 * rounds + 1)
    ]
    cycles = [chosen[:rounds], chosen[rounds:]]
    widths = {0.2: [5] * 6, 0.3: [4] * 3 + [3] * 6}[share]
    for cycle in cycles:
        times = np.bincount(np.concatenate(cycle), minlength=30)
        np.testing.assert_array_equal(times, np.repeat([rounds // w for w in widths], widths))
    same = [np.array_equal(*pair) for pair in zip(*cycles, strict=True)]
    assert all(same) if selector == "shuffled" else not all(same)


def optimizer_message(optimizer: Optimizer, params: dict) -> dict:
    own, shared = optimizer.init(params)
    return optimizer.send(own, params, shared, 1)[0]


@pytest.mark.parametrize(
    "optimizer, count",
    [
        *((optimizer_of(share=share), count) for share, count in ((1.0, 30), (0.3, 9), (1e-6, 1))),
        (sparta_diloco(optimizer_of(share=SHARE), OUTER, outer_every=4), 9 + 8),
    ],
)
def test_a_message_has_a_share_of_the_elements_and_no_places_and_a_fragment(optimizer, count):
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    message, _ = jax.jit(optimizer.send)(own, params, shared, 1)
    form = wire.form_of(optimizer, params, "lockstep")
    data = wire.encode(jax.device_get(message), form)
    assert len(data) == wire.HEADER.size + 4 * count
    jax.tree.map(np.testing.assert_array_equal, wire.decode(data, form), message)


# SPARTA alone; then with DiLoCo's outer steps, of the 30 elements at once, of ranges of 15, and of
# 8, 8, 8 and 6
@pytest.mark.parametrize("every", [0, 1, 2, 4])
def test_every_round_is_the_equations(every):
    sparse = optimizer_of(share=SHARE)
    optimizer = sparta_diloco(sparse, OUTER, outer_every=every) if every else sparse
    peers = Peers(optimizer, {"w": jnp.array(START)}, PEERS)
    theta = START.astype(np.float64).ravel()
    anchor, trace = theta.copy(), np.zeros_like(theta)
    local = np.stack([theta] * PEERS)
    momentum = np.zeros_like(local)
    targets = TARGETS.astype(np.float64).reshape(PEERS, -1)
    cuts = max(every, 1)
    ranges = np.array_split(np.arange(-(-theta.size // cuts) * cuts), cuts)
    for step in range(1, 2 * max(every, 2) + 3):
        present = [1, int(step != 3), 1]
        sent = peers.train(TARGETS, STEPS, step)
        peers.receive(sent, step, present)
        for _ in range(STEPS):
            momentum = 0.5 * momentum + local - targets
            local = local - RATE * momentum
        at = places(step, theta.size)
        part = [place for place in ranges[(step - 1) % cuts] if place < theta.size and every]
        for message, mine in zip(sent, local, strict=True):
            found, fragment = message if every else (message, {"w": np.zeros(0)})
            np.testing.assert_allclose(found["w"], theta[at] - mine[at], atol=2e-6)
            far = theta[part] - mine[part]
            np.testing.assert_allclose(fragment["w"][: len(part)], far, atol=2e-6)
        mean = local[np.array(present) > 0].mean(axis=0)
        theta[at] = mean[at]
        pseudogradient = anchor[part] - mean[part]
        trace[part] = 0.6 * trace[part] + pseudogradient
        theta[part] = anchor[part] - 0.7 * (pseudogradient + 0.6 * trace[part])
        anchor[part] = theta[part]
        for places_ in (at, part):
            local[:, places_] = theta[places_]
        np.testing.assert_allclose(peers.params["w"].ravel(), theta, rtol=0, atol=3e-6)
        for peer in range(PEERS):
            np.testing.assert_allclose(peers.ahead(peer, step)["w"].ravel(), local[peer], atol=3e-6)
