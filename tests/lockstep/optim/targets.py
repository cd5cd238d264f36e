"""Where four peers pull: each elsewhere, so that only together they know their mean or median."""

import jax
import jax.numpy as jnp

PEERS = 4
OFFSETS = jnp.array([-0.1, 0.0, 0.0, 0.5])  # their mean is 0.1, their median 0


def around(offset: jax.Array | float) -> dict:
    key = jax.random.key(7)
    common = {"w": jax.random.normal(key, (8, 16)), "b": jax.random.normal(key, (16,))}
    return jax.tree.map(lambda x: x + offset, common)


def target(peer: jax.Array) -> dict:
    """Each peer pulls elsewhere; only together do they know their mean, or their median."""
    return around(OFFSETS[peer])


REST = {"mean": around(OFFSETS.mean()), "median": around(jnp.median(OFFSETS))}
