"""burn_p2p's merge policies as rules and outer steps, each doing what it is called, as
docs/how-to/tolerate-liars.md names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import norm_clip, trimmed_mean
from lockstep.optim.local.local_steps import outer_sgd
from lockstep.optim.optimizer import RoundPeers

WEIGHT = np.int32([3, 1, 2, 4])  # sequences that each peer trained on
RATE = 0.35  # the share of the merged params in burn_p2p's root EMA
rng = np.random.default_rng(0)
BASE = rng.standard_normal((5, 3)).astype(np.float32)
CANDIDATES = BASE + rng.standard_normal((4, 5, 3)).astype(np.float32) * [[[1]], [[2]], [[9]], [[1]]]
WEIGHTED = np.average(CANDIDATES, axis=0, weights=WEIGHT)
NORM = np.linalg.norm(CANDIDATES - BASE, axis=(1, 2), keepdims=True)
CLIPPED = (CANDIDATES - BASE) * np.minimum(1, np.median(NORM) / NORM)


def heaviest(values, weight):
    return jax.tree.map(lambda x: x[jnp.argmax(weight)], values)


POLICIES = {  # by burn_p2p's name: ours, and the params that candidates become
    "WeightedMean": (outer_sgd(1.0), WEIGHTED),
    "NormClippedWeightedMean": (
        outer_sgd(1.0, aggregate=norm_clip),
        BASE + np.average(CLIPPED, axis=0, weights=WEIGHT),
    ),
    "TrimmedMean": (
        outer_sgd(1.0, aggregate=trimmed_mean(1)),
        np.sort(CANDIDATES, axis=0)[1:-1].mean(axis=0),
    ),
    "Ema": (outer_sgd(RATE), (1 - RATE) * BASE + RATE * WEIGHTED),
    "Custom": (outer_sgd(1.0, aggregate=heaviest), CANDIDATES[3]),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_merges_candidates_as_it_is_called(policy):
    optimizer, expected = POLICIES[policy]
    params = {"w": jnp.array(BASE)}
    messages = {"w": jnp.array(BASE - CANDIDATES, jnp.float32)}
    peers = RoundPeers.synchronous(jnp.array(WEIGHT))
    _, shared = optimizer.init(params)
    updates, _ = optimizer.receive(messages, peers, params, shared, jnp.int32(1))
    np.testing.assert_allclose(BASE + updates["w"], expected, rtol=1e-5, atol=1e-5)
