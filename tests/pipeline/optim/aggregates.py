"""Aggregates that are not the mean: what an optimizer that takes another one comes to."""

import jax
import jax.numpy as jnp

from pipeline.optim.aggregate import mean
from pipeline.optim.optimizer import Tree


def median(values: Tree, weight: jax.Array) -> Tree:
    """The weighted median of each element; half-way between two where both are in the middle."""

    def of_leaf(x):
        weight_P = weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim)) * jnp.ones(x.shape)
        order_P = jnp.argsort(jnp.where(weight_P > 0, x, jnp.inf), axis=0)
        x, weight_P = (
            jnp.take_along_axis(y, order_P, axis=0)
            for y in (jnp.where(weight_P > 0, x, 0.0), weight_P)
        )
        past_P = jnp.cumsum(weight_P, axis=0)
        half = past_P[-1] / 2
        middle = [jnp.argmax(there, axis=0)[None] for there in (past_P >= half, past_P > half)]
        return sum(jnp.take_along_axis(x, at, axis=0)[0] for at in middle) / 2

    return jax.tree.map(of_leaf, values)


def vote(values: Tree, weight: jax.Array) -> Tree:
    """The sign that most peers have, by their weights."""
    return jax.tree.map(jnp.sign, mean(jax.tree.map(jnp.sign, values), weight))
