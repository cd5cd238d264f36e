"""SGD against NumPy float64, written from the equations alone."""

import jax
import numpy as np
import pytest

from lockstep.optim.dense import sgd
from lockstep.optim.optimizer import RoundPeers
from tests.lockstep.optim.compiled import compiled

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.05


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (MOMENTUM, False), (MOMENTUM, True)])
def test_every_step_is_the_equations(momentum, nesterov):
    rng = np.random.default_rng(0)
    optimizer = compiled(sgd(RATE, momentum=momentum, nesterov=nesterov, weight_decay=DECAY))
    params = {"w": rng.normal(size=(6, 4)).astype(np.float32)}
    theta, history = params["w"].astype(np.float64), []
    _, shared = optimizer.init(params)
    for step in range(1, 5):
        grads = rng.normal(size=(3, 6, 4)).astype(np.float32)
        here = np.array([True, step != 2, True])
        updates, shared = optimizer.receive(
            {"w": grads}, RoundPeers.synchronous(np.int32(here)), params, shared, step
        )
        params = jax.tree.map(np.add, params, updates)

        history.append(grads[here].astype(np.float64).mean(axis=0))
        m = sum(momentum**age * g for age, g in enumerate(reversed(history)))
        d = history[-1] + momentum * m if nesterov else m
        theta = theta - RATE * (d + DECAY * theta)
        np.testing.assert_allclose(params["w"], theta, rtol=0, atol=1e-6)


def test_momentum_takes_a_steady_gradient_ten_times_as_far():
    """In the end: the sum of all powers of 0.9 is 10."""
    params = {"w": np.zeros(2, np.float32)}
    optimizer = compiled(sgd(RATE, momentum=MOMENTUM))
    _, shared = optimizer.init(params)
    for step in range(1, 100):
        updates, shared = optimizer.receive(
            {"w": np.ones((1, 2), np.float32)},
            RoundPeers.synchronous(np.ones(1, np.int32)),
            params,
            shared,
            step,
        )
    np.testing.assert_allclose(updates["w"], -10 * RATE, rtol=1e-3)
