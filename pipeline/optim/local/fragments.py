"""Fragments of the params: of each the same number of equal ranges, which are exchanged in turns.

Shapes: F fragments, N elements of a parameter in each.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pipeline.optim.optimizer import Optimizer, Tree


def fragment_of(step: jax.Array, fragments: int) -> jax.Array:
    """Return the fragment that is exchanged in a round: 0 in the first, and then in turns."""
    return (step - 1) % fragments


def take(tree: Tree, number: jax.Array, fragments: int) -> Tree:
    """Return a fragment of params: [N] of each."""
    return row(jax.tree.map(partial(_cut, fragments=fragments), tree), number)


def put(tree: Tree, part: Tree, number: jax.Array, fragments: int) -> Tree:
    """Return params of which one fragment is another."""

    def of_leaf(x: jax.Array, part_N: jax.Array) -> jax.Array:
        rows_FN = put_row(_cut(x, fragments), part_N, number)
        flat: jax.Array = rows_FN.ravel()[: x.size]
        return flat.reshape(x.shape)

    return jax.tree.map(of_leaf, tree, part)


def init_of_each(optimizer: Optimizer, params: Tree, fragments: int) -> tuple[Tree, Tree]:
    """Return the first states of an optimizer of each fragment by itself, with a leading axis F."""

    def of_one(number: jax.Array) -> tuple[Tree, Tree]:
        return optimizer.init(take(params, number, fragments))

    return jax.vmap(of_one)(jnp.arange(fragments))


def row(states: Tree, number: jax.Array) -> Tree:
    """Return a fragment's state among those of all."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), states)


def put_row(states: Tree, state: Tree, number: jax.Array) -> Tree:
    """Return the states of all fragments, of which one is another."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, number, 0), states, state
    )


def _cut(x: jax.Array, fragments: int) -> jax.Array:
    """Return [F, N], the last of them filled up with zeros."""
    width = -(-x.size // fragments)
    return jnp.pad(x.ravel(), (0, fragments * width - x.size)).reshape(fragments, width)
