"""DeMo as an optax transform."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.compressed.distro import demo
from lockstep.optim.transform import all_gather, alone
from tests.lockstep.optim.compressed.reference import Distro

PEERS, STEPS = 4, 3
SETTINGS = {
    "compression_decay": 0.9,
    "compression_topk": 4,
    "compression_chunk": 8,
    "weight_decay": 0.1,
}


def test_it_follows_the_authors_reference_and_all_peers_agree():
    """At a learning rate that falls from step to step, the first of which is 1."""
    tx = demo(lambda step: 0.03 / step, **SETTINGS, exchange=all_gather("peer"))

    @jax.jit
    @jax.vmap
    def begin(theta):
        return tx.init({"w": theta})

    @jax.jit
    def take(theta, state, grads):
        def one(theta, state, grad):
            updates, state = tx.update({"w": grad}, state, {"w": theta})
            return optax.apply_updates(theta, updates["w"]), state

        return jax.vmap(one, axis_name="peer")(theta, state, grads)

    theta = jnp.ones((PEERS, 8, 16))
    state, rng = begin(theta), np.random.default_rng(0)
    settings = {"decay": 0.9, "topk": 4, "chunk": 8, "wd": 0.1}
    reference = Distro(np.ones((8, 16)), PEERS, one_bit=False, clip=None, overlap=0, **settings)
    for step in range(1, STEPS + 1):
        grads = rng.normal(size=(PEERS, 8, 16)).astype(np.float32)
        theta, state = take(theta, state, grads)
        reference.round(grads, 0.03 / step, 0.03 / (step + 1))
    for peer in range(PEERS):
        np.testing.assert_allclose(theta[peer], reference.theta, atol=1e-6)


def test_params_are_asked_for():
    tx, params = demo(0.01, **SETTINGS, exchange=alone), {"w": jnp.ones(8)}
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))
