"""Peers that are each drawn to a target of their own: half of the squared distance is the loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim.optimizer import Optimizer
from lockstep.optim.transform import all_gather, as_transform, lookahead_params

PEERS = 3
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 6, 4)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


def begin(optimizer: Optimizer) -> tuple[dict, tuple]:
    """The first params, and the states of all peers."""
    tx = as_transform(optimizer, all_gather("peer"), lookahead=True)
    params = {"w": jnp.array(START)}
    return params, jax.vmap(lambda _: tx.init(params))(jnp.arange(PEERS))


@partial(jax.jit, static_argnums=0)
def step(optimizer: Optimizer, params: dict, state: tuple) -> tuple[dict, tuple]:
    """One local step of all peers."""
    tx = as_transform(optimizer, all_gather("peer"), lookahead=True)

    def one(state, target):
        grads = {"w": lookahead_params(optimizer, params, state)["w"] - target}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    stepped, state = jax.vmap(one, axis_name="peer")(state, TARGETS)
    return jax.tree.map(lambda x: x[0], stepped), state
