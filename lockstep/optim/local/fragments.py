"""Fragments of the params, exchanged in turn: each is one of F equal ranges of every parameter.

Shapes: F fragments, N elements of a parameter in each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.optimizer import Optimizer, Tree


class Fragments(NamedTuple):
    """Params cut into fragments, of which each round exchanges one.

    Attributes:
      total: F.
    """

    total: int

    def in_round(self, step: jax.Array) -> jax.Array:
        """Return the number of the fragment that round `step` exchanges, 0 in the first one."""
        return (step - 1) % self.total

    def take(self, tree: Tree, number: jax.Array) -> Tree:
        """Return a fragment of params: [N] of each."""
        return row(jax.tree.map(self._cut, tree), number)

    def put(self, tree: Tree, part: Tree, number: jax.Array) -> Tree:
        """Return params with one fragment replaced."""

        def replace_row(x: jax.Array, part_N: jax.Array) -> jax.Array:
            rows_FN = put_row(self._cut(x), part_N, number)
            flat: jax.Array = rows_FN.ravel()[: x.size]
            return flat.reshape(x.shape)

        return jax.tree.map(replace_row, tree, part)

    def init_of_each(self, optimizer: Optimizer, params: Tree) -> tuple[Tree, Tree]:
        """Return the first states of one optimizer for each fragment, with a leading axis F."""

        def init_fragment(number: jax.Array) -> tuple[Tree, Tree]:
            return optimizer.init(self.take(params, number))

        return jax.vmap(init_fragment)(jnp.arange(self.total))

    def _cut(self, x: jax.Array) -> jax.Array:
        """Return [F, N], the last row padded with zeros."""
        width = -(-x.size // self.total)
        return jnp.pad(x.ravel(), (0, self.total * width - x.size)).reshape(self.total, width)


def row(states: Tree, number: jax.Array) -> Tree:
    """Return a fragment's state among those of all."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), states)


def put_row(states: Tree, state: Tree, number: jax.Array) -> Tree:
    """Return the states of all fragments with one replaced."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, number, 0), states, state
    )
