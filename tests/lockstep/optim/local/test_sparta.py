"""SPARTA against NumPy float64, which averages local params where the places say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.dense import sgd
from lockstep.optim.local.local_steps import fedavg
from lockstep.optim.local.sparta import sparta
from lockstep.optim.optimizer import Optimizer, RoundPeers
from lockstep.wire import message as wire
from tests.lockstep.optim.compiled import compiled

PEERS, ROUNDS, STEPS, RATE, SHARE = 3, 6, 2, 0.1, 0.3
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 5, 6)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
INNER = sgd(RATE, momentum=0.5)
optimizer_of = partial(sparta, INNER, inner_steps=STEPS, seed=3)


def places(step: int, size: int) -> list[int]:
    """One of each part, drawn by JAX's generator one at a time from bounds written out."""
    key = jax.random.fold_in(jax.random.key(3), step)
    count = round(SHARE * size)
    widths = [size // count + (part < size % count) for part in range(count)]
    drawn = jax.random.randint(jax.random.fold_in(key, 0), (count,), 0, np.array(widths))
    return [sum(widths[:part]) + int(place) for part, place in enumerate(drawn)]


class Peers:
    """All peers' own states, of an optimizer, and the params of all."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = compiled(optimizer)
        self.params = {"w": jnp.array(START)}
        own, self.shared = self.optimizer.init(self.params)
        self.own = [own] * PEERS

    def local(self, peer: int, step: int) -> jax.Array:
        return self.optimizer.lookahead(self.params, self.own[peer], self.shared, step)["w"]

    def round(self, step: int, present: list[bool]) -> list[dict]:
        """Take a round: half of the squared distance to its target is a peer's loss."""
        messages = []
        for peer, target in enumerate(TARGETS):
            for _ in range(STEPS):
                grads = {"w": self.local(peer, step) - target}
                self.own[peer] = self.optimizer.accumulate(grads, self.own[peer], self.params, step)
            message, own = self.optimizer.send(self.own[peer], self.params, self.shared, step)
            distance, compared = self.optimizer.compare(self.own[peer], message, self.params, step)
            assert float(distance) == 0
            jax.tree.map(np.testing.assert_array_equal, compared, own)
            self.own[peer] = own
            messages.append(message)
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *messages)
        updates, self.shared = self.optimizer.receive(
            stacked, RoundPeers.synchronous(jnp.int32(present)), self.params, self.shared, step
        )
        self.params = jax.tree.map(jnp.add, self.params, updates)
        return messages


def test_every_round_is_the_equations():
    peers = Peers(optimizer_of(share=SHARE))
    theta = START.astype(np.float64).ravel()
    local = np.stack([theta] * PEERS)
    momentum = np.zeros_like(local)
    targets = TARGETS.astype(np.float64).reshape(PEERS, -1)
    for step in range(1, ROUNDS + 1):
        present = [True, step != 3, True]
        sent = peers.round(step, present)
        for _ in range(STEPS):
            momentum = 0.5 * momentum + local - targets
            local = local - RATE * momentum
        at = places(step, theta.size)
        for message, mine in zip(sent, local, strict=True):
            np.testing.assert_allclose(message["w"], theta[at] - mine[at], atol=1e-6)
        theta[at] = local[present][:, at].mean(axis=0)
        local[:, at] = theta[at]
        np.testing.assert_allclose(peers.params["w"].ravel(), theta, rtol=0, atol=1e-6)
        for peer in range(PEERS):
            np.testing.assert_allclose(peers.local(peer, step).ravel(), local[peer], atol=1e-6)


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


@pytest.mark.parametrize("share, count", [(1.0, 30), (0.3, 9), (1e-6, 1)])
def test_a_message_has_a_share_of_the_elements_and_no_places(share, count):
    optimizer = optimizer_of(share=share)
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    message, _ = jax.jit(optimizer.send)(own, params, shared, 1)
    form = wire.form_of(optimizer, params, "lockstep")
    data = wire.encode(jax.device_get(message), form)
    assert len(data) == wire.HEADER.size + 4 * count
    jax.tree.map(np.testing.assert_array_equal, wire.decode(data, form), message)


def test_all_places_in_every_round_are_federated_averaging():
    every, average = Peers(optimizer_of(share=1.0)), Peers(fedavg(INNER, inner_steps=STEPS))
    for step in range(1, 4):
        for peers in (every, average):
            peers.round(step, [True, True, False])
    np.testing.assert_array_equal(every.params["w"], average.params["w"])


def test_a_lone_peer_trains_as_without_rounds():
    optimizer = compiled(optimizer_of(share=SHARE))
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    plain = optax.sgd(RATE, 0.5)
    theta, state = params, plain.init(params)
    for step in range(1, ROUNDS + 1):
        for _ in range(STEPS):
            here = optimizer.lookahead(params, own, shared, step)
            own = optimizer.accumulate(jax.tree.map(jnp.sin, here), own, params, step)
            updates, state = plain.update(jax.tree.map(jnp.sin, theta), state)
            theta = optax.apply_updates(theta, updates)
        message, own = optimizer.send(own, params, shared, step)
        received = jax.tree.map(lambda x: x[None], message)
        updates, shared = optimizer.receive(
            received, RoundPeers.synchronous(jnp.ones(1, jnp.int32)), params, shared, step
        )
        params = jax.tree.map(jnp.add, params, updates)
    here = optimizer.lookahead(params, own, shared, ROUNDS)
    np.testing.assert_allclose(here["w"], theta["w"], rtol=0, atol=1e-6)
    assert (params["w"] != theta["w"]).any()  # what peers agreed on is behind
