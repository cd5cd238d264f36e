"""DeMo as an optax transform: it composes as its neighbours do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.compressed.distro import demo
from lockstep.optim.transform import all_gather
from tests.lockstep.optim.compressed.reference import Distro

PEERS = 4
SETTINGS = {
    "compression_decay": 0.9,
    "compression_topk": 4,
    "compression_chunk": 8,
    "weight_decay": 0.1,
    "exchange": all_gather("peer"),
}
PARAMS = {"kernel": jnp.ones((8, 16)), "norm": {"scale": jnp.ones(8)}}


def grads_of(peer, step):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(step), peer), 2)
    return {
        "kernel": jax.random.normal(keys[0], (8, 16)),
        "norm": {"scale": jax.random.normal(keys[1], (8,))},
    }


def train(tx, steps=3):
    """Params and state of all peers after some steps of one jitted program, compiled once."""

    @jax.jit
    def take(params, state, step):
        def one(params, state, peer):
            updates, state = tx.update(grads_of(peer, step), state, params)
            return optax.apply_updates(params, updates), state

        return jax.vmap(one, axis_name="peer")(params, state, jnp.arange(PEERS))

    params = jax.tree.map(lambda x: jnp.stack([x] * PEERS), PARAMS)
    state = jax.vmap(tx.init)(params)
    for step in range(steps):
        params, state = take(params, state, jnp.int32(step))
    assert take._cache_size() == 1
    return params


def expect_equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_it_follows_the_authors_reference_and_all_peers_agree():
    """At a learning rate that falls from step to step, the first of which is 1."""
    params = train(demo(lambda step: 0.03 / step, **SETTINGS))
    settings = {"decay": 0.9, "topk": 4, "chunk": 8, "wd": 0.1}
    reference = Distro(np.ones((8, 16)), PEERS, one_bit=False, clip=None, overlap=0, **settings)
    for step in range(3):
        grads = [grads_of(peer, step)["kernel"] for peer in range(PEERS)]
        reference.round(np.array(grads), 0.03 / (step + 1), 0.03 / (step + 2))
    for peer in range(PEERS):
        np.testing.assert_allclose(params["kernel"][peer], reference.theta, atol=1e-6)


def test_masked_tensors_are_left_to_another_transform():
    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim == 2, params)

    def is_vector(params):
        return jax.tree.map(lambda x: x.ndim == 1, params)

    both = optax.chain(
        optax.masked(demo(0.01, **SETTINGS), is_matrix), optax.masked(optax.sgd(0.1), is_vector)
    )
    found = train(both, 1)
    expect_equal(found["kernel"], train(demo(0.01, **SETTINGS), 1)["kernel"])
    grads = jnp.stack([grads_of(peer, 0)["norm"]["scale"] for peer in range(PEERS)])
    expect_equal(found["norm"]["scale"], 1 - 0.1 * grads)


def test_params_are_asked_for():
    with pytest.raises(ValueError, match="params"):
        tx = demo(0.01, **SETTINGS)
        tx.update(PARAMS, tx.init(PARAMS))
