"""Optimizers with local steps against NumPy float64, written from the equations alone."""

import numpy as np
import optax
import pytest

from lockstep.optim.dense import adamw
from lockstep.optim.local.local_steps import diloco, fedavg, outer_sgd
from tests.lockstep.optim.quadratic import PEERS, START, TARGETS, begin, step

STEPS, ROUNDS = 3, 4
MOMENTUM = 0.9
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 2.0
RATE = optax.linear_schedule(0.1, 0.02, ROUNDS)
INNER = adamw(RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, clip_grad_norm=CLIP)
OPTIMIZERS = {
    "diloco": diloco(INNER, outer_sgd(0.7, momentum=MOMENTUM, nesterov=True), inner_steps=STEPS),
    "diloco without Nesterov": diloco(INNER, outer_sgd(0.7, momentum=MOMENTUM), inner_steps=STEPS),
    "fedavg": fedavg(INNER, inner_steps=STEPS),
}


class AdamW:
    """A peer's own, in float64."""

    def __init__(self) -> None:
        self.m, self.v, self.count = 0.0, 0.0, 0

    def step(self, theta: np.ndarray, g: np.ndarray, lr: float) -> np.ndarray:
        g = g * min(1.0, CLIP / (np.sqrt((g**2).sum()) + 1e-6))
        self.count += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        m, v = (x / (1 - b**self.count) for x, b in ((self.m, BETAS[0]), (self.v, BETAS[1])))
        return theta - lr * (m / (np.sqrt(v) + EPS) + DECAY * theta)


def expected(name: str) -> list[np.ndarray]:
    """The params after each round."""
    theta, found, trace = START.astype(np.float64), [], 0.0
    peers = [AdamW() for _ in range(PEERS)]
    for t in range(1, ROUNDS + 1):
        local = []
        for peer, target in zip(peers, TARGETS.astype(np.float64), strict=True):
            here = theta
            for h in range(STEPS):
                done = t - 1 + (h + 1) / STEPS
                here = peer.step(here, here - target, 0.1 + (0.02 - 0.1) * done / ROUNDS)
            local.append(here)
        if name == "fedavg":
            theta = np.mean(local, axis=0)
        else:
            pseudogradient = theta - np.mean(local, axis=0)
            trace = MOMENTUM * trace + pseudogradient
            nesterov = pseudogradient + MOMENTUM * trace
            theta = theta - 0.7 * (nesterov if name == "diloco" else trace)
        found.append(theta)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_round_is_the_equations(name):
    optimizer = OPTIMIZERS[name]
    params, state = begin(optimizer)
    compiled_before = step._cache_size()
    for theta in expected(name):
        for h in range(STEPS):
            before = params
            params, state = step(optimizer, params, state)
            assert (params["w"] != before["w"]).any() == (h == STEPS - 1)
        np.testing.assert_allclose(params["w"], theta, rtol=0, atol=3e-6)
    assert step._cache_size() <= compiled_before + 1  # nothing is compiled anew
