"""burn_p2p's merge policies as rules and outer steps, each doing what it is called, as
docs/how-to/tolerate-liars.md names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import mean, norm_clip, trimmed_mean
from lockstep.optim.local.local_steps import outer_sgd
from lockstep.optim.optimizer import RoundPeers

WEIGHT = np.int32([3, 1, 2, 4])  # sequences that each peer trained on
RATE = 0.35  # the share of the merged params in burn_p2p's root EMA
rng = np.random.default_rng(0)
BASE = rng.standard_normal((5, 3)).astype(np.float32)
CANDIDATES = BASE + rng.standard_normal((4, 5, 3)).astype(np.float32) * [[[1]], [[2]], [[9]], [[1]]]


def weighted_mean():
    return np.average(CANDIDATES, axis=0, weights=WEIGHT)


def norm_clipped_weighted_mean():
    update = CANDIDATES - BASE
    norm = np.linalg.norm(update, axis=(1, 2), keepdims=True)
    clipped = update * np.minimum(1, np.median(norm) / norm)
    return BASE + np.average(clipped, axis=0, weights=WEIGHT)


def trimmed():
    return np.sort(CANDIDATES, axis=0)[1:-1].mean(axis=0)


def root_ema():
    return (1 - RATE) * BASE + RATE * weighted_mean()


def heaviest():
    return CANDIDATES[3]


def of_the_heaviest(values, weight):
    return jax.tree.map(lambda x: x[jnp.argmax(weight)], values)


POLICIES = {
    "WeightedMean": (outer_sgd(1.0, aggregate=mean), weighted_mean),
    "NormClippedWeightedMean": (
        outer_sgd(1.0, aggregate=norm_clip),
        norm_clipped_weighted_mean,
    ),
    "TrimmedMean": (outer_sgd(1.0, aggregate=trimmed_mean(1)), trimmed),
    "Ema": (outer_sgd(RATE, aggregate=mean), root_ema),
    "Custom": (outer_sgd(1.0, aggregate=of_the_heaviest), heaviest),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_merges_candidates_as_it_is_called(policy):
    optimizer, by_hand = POLICIES[policy]
    params = {"w": jnp.array(BASE)}
    messages = {"w": jnp.array(BASE - CANDIDATES, jnp.float32)}
    peers = RoundPeers.synchronous(jnp.array(WEIGHT))
    _, shared = optimizer.init(params)
    updates, _ = optimizer.receive(messages, peers, params, shared, jnp.int32(1))
    np.testing.assert_allclose(BASE + updates["w"], by_hand(), rtol=1e-5, atol=1e-5)
