"""Rounded messages with error feedback, in DiLoCo, against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.dense import sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.quantize import QSGD, Half, Integers, Levels, quantized
from lockstep.wire import message as wire
from tests.lockstep.optim.compiled import Peers

PEERS, ROUNDS, STEPS, RATE, FEEDBACK, BLOCK = 2, 5, 2, 0.1, 0.9, 8
MOMENTUM = 0.5
OUTER = outer_sgd(0.7, momentum=MOMENTUM, nesterov=True)
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 4, 6)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)


def test_every_round_is_the_equations():
    optimizer = diloco(sgd(RATE), quantized(OUTER, Levels(1, BLOCK), FEEDBACK), inner_steps=STEPS)
    peers = Peers(optimizer, {"w": jnp.array(START)}, PEERS)
    theta, trace = START.astype(np.float64), np.zeros(START.shape)
    left_out = np.zeros(TARGETS.shape)
    for t in range(1, ROUNDS + 1):
        messages, decoded = peers.train(TARGETS, STEPS, t), []
        for peer, target in enumerate(TARGETS):
            local = theta.copy()
            for _ in range(STEPS):
                local -= RATE * (local - target)
            x = theta - local + FEEDBACK * left_out[peer]
            blocks = x.reshape(-1, BLOCK)
            level = np.abs(blocks).mean(axis=1, keepdims=True)
            q = (np.sign(blocks) * level).reshape(x.shape)
            left_out[peer] = x - q
            decoded.append(q)
            np.testing.assert_allclose(peers.own[peer].outer.error["w"], left_out[peer], atol=1e-6)
        peers.receive(messages, t)
        mean = np.mean(decoded, axis=0)
        trace = MOMENTUM * trace + mean
        theta = theta - 0.7 * (mean + MOMENTUM * trace)
        np.testing.assert_allclose(peers.params["w"], theta, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("quantizer", "size"),
    [
        (Half(jnp.bfloat16), 48),
        (Integers(8, BLOCK), 3 * 4 + 24),
        (Integers(4, BLOCK), 3 * 4 + 12),
        (QSGD(4, BLOCK), 3 * 4 + 12),
        (Levels(2, BLOCK), 3 * 8 + 6),
        (Levels(1, BLOCK), 3 * 4 + 3),
    ],
)
def test_a_message_is_as_large_as_said_and_comes_through(quantizer, size):
    optimizer = diloco(sgd(RATE), quantized(OUTER, quantizer), inner_steps=STEPS)
    params = {"w": jnp.array(START)}
    own, shared = optimizer.init(params)
    own = optimizer.accumulate({"w": params["w"]}, own, params, 1)
    message = jax.device_get(optimizer.send(own, params, shared, 1)[0])
    form = wire.form_of(optimizer, params, "lockstep")
    data = wire.encode(message, form)
    assert len(data) == wire.HEADER.size + size
    jax.tree.map(np.testing.assert_array_equal, wire.decode(data, form), message)
    assert form.kept == (size <= 24 / 2)
