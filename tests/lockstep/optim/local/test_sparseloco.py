"""SparseLoCo against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.dense import sgd
from lockstep.optim.local.sparseloco import sparseloco
from lockstep.wire import message as wire
from tests.lockstep.optim.compiled import Peers

PEERS, ROUNDS, STEPS, RATE, OUTER_RATE, FEEDBACK, TOPK, CHUNK = 3, 5, 2, 0.1, 0.8, 0.9, 3, 4
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 8, 4)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
OPTIMIZER = sparseloco(
    sgd(RATE, momentum=0.5), inner_steps=STEPS, outer_learning_rate=OUTER_RATE,
    error_feedback=FEEDBACK, topk=TOPK, chunk=CHUNK,
)  # fmt: skip


def quantized(e: np.ndarray) -> np.ndarray:
    """The largest of each block of 4 x 4: a sign, times the mean of the small or of the large."""
    found = np.zeros(e.shape)
    for block, out in zip(np.split(e, 2), np.split(found, 2), strict=True):  # views
        at = np.argsort(-np.abs(block).ravel(), kind="stable")[:TOPK]
        size = np.abs(block.ravel()[at])
        large = size > size.mean()
        level = np.where(large, size[large].mean(), size[~large].mean())
        out.ravel()[at] = np.sign(block.ravel()[at]) * level
    return found


def test_every_round_is_the_equations():
    peers = Peers(OPTIMIZER, {"w": jnp.array(START)}, PEERS)
    theta, momentum, e = START.astype(np.float64), np.zeros(TARGETS.shape), np.zeros(TARGETS.shape)
    for t in range(1, ROUNDS + 1):
        present = [1, int(t != 3), 1]
        messages = peers.train(TARGETS, STEPS, t)
        for peer, target in enumerate(TARGETS):
            local = theta.copy()
            for _ in range(STEPS):
                momentum[peer] = 0.5 * momentum[peer] + local - target
                local -= RATE * momentum[peer]
            e[peer] = FEEDBACK * e[peer] + theta - local
        q = np.stack([quantized(x) for x in e])
        e -= q
        peers.receive(messages, t, present)
        theta = theta - OUTER_RATE * q[np.array(present) > 0].mean(axis=0)
        np.testing.assert_allclose(peers.params["w"], theta, rtol=0, atol=2e-6)
        for peer in range(PEERS):
            np.testing.assert_allclose(peers.own[peer].outer["w"], e[peer], rtol=0, atol=2e-6)


def first_message() -> tuple[dict, dict]:
    """A message, and the params."""
    params = {"w": jnp.array(START)}
    own, shared = OPTIMIZER.init(params)
    own = OPTIMIZER.accumulate({"w": jnp.array(TARGETS[0])}, own, params, 1)
    return jax.device_get(OPTIMIZER.send(own, params, shared, 1)[0]), params


def test_a_message_comes_through_on_psyches_wire():
    """Two levels, a bit and a sign and a place for each of 2 x 3 elements."""
    message, params = first_message()
    form = wire.form_of(OPTIMIZER, params, "psyche")
    data = wire.encode(message, form)
    jax.tree.map(np.testing.assert_array_equal, wire.decode(data, form), message)
    assert len(data) == wire.HEADER.size + 2 * 8 + 1 + 1 + 6
