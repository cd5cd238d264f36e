"""An aggregate that is no rule of the library, and what an optimizer comes to with it."""

import jax
import jax.numpy as jnp

from lockstep.optim.aggregation import mean
from lockstep.optim.optimizer import Tree


def vote(values: Tree, weight: jax.Array) -> Tree:
    """The sign that most peers have, by their weights."""
    return jax.tree.map(jnp.sign, mean(jax.tree.map(jnp.sign, values), weight))
