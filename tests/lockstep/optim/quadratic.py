"""Peers that are each drawn to a target of their own: half of the squared distance is the loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.optim.transform import all_gather, as_transform, lookahead_params

PEERS = 3
TARGETS = np.random.default_rng(0).normal(size=(PEERS, 6, 4)).astype(np.float32)
START = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
ALL = {"w": TARGETS}


@partial(jax.jit, static_argnums=(0, 2))
def states(optimizer: Optimizer, params: Tree, peers: int) -> tuple:
    """The states of all peers before the first local step."""
    tx = as_transform(optimizer, all_gather("peer"), lookahead=True)
    return jax.vmap(lambda _: tx.init(params))(jnp.arange(peers))


def begin(optimizer: Optimizer) -> tuple[dict, tuple]:
    """The first params, and the states of all peers."""
    params = {"w": jnp.array(START)}
    return params, states(optimizer, params, PEERS)


def gradient(optimizer: Optimizer, params: Tree, state: tuple, target: Tree) -> Tree:
    """A peer's gradient, where it takes it."""
    return jax.tree.map(jnp.subtract, lookahead_params(optimizer, params, state), target)


@partial(jax.jit, static_argnums=0)
def step(optimizer: Optimizer, params: Tree, state: tuple, targets: Tree = ALL) -> tuple:
    """One local step of all peers: params and states."""
    tx = as_transform(optimizer, all_gather("peer"), lookahead=True)

    def one(state, target):
        updates, state = tx.update(gradient(optimizer, params, state, target), state, params)
        return optax.apply_updates(params, updates), state

    stepped, state = jax.vmap(one, axis_name="peer")(state, targets)
    return jax.tree.map(lambda x: x[0], stepped), state
