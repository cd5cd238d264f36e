"""Any tree of params as nested dicts, which optimizers, messages and checkpoints take, and back."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import KeyPath, Tree


class Nesting:
    """How the arrays of a tree of params are named in nested dicts.

    Raises:
      LockstepError: An array is not of floating-point numbers, or empty, or there is none.
    """

    def __init__(self, params: Tree):
        leaves, self._structure = jax.tree.flatten_with_path(params)
        self._names = [_names(path) for path, _ in leaves]
        if not leaves:
            raise LockstepError("simulate: params is an empty tree, expected arrays")
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            dtype = getattr(leaf, "dtype", type(leaf).__name__)
            if not (hasattr(leaf, "dtype") and jnp.issubdtype(dtype, jnp.floating)):
                raise LockstepError(
                    f"simulate: params {'/'.join(name)} is {dtype}, expected an array of "
                    "floating-point numbers; what is not trained goes into loss_fn"
                )
            if not leaf.size:
                raise LockstepError(
                    f"simulate: params {'/'.join(name)} has the shape {leaf.shape}, expected "
                    "elements in it"
                )
        if len(set(self._names)) < len(self._names):
            raise LockstepError("simulate: params has two arrays of one name, expected different")

    def nested(self, params: Tree) -> dict:
        """Return the arrays in nested dicts, in float32 on the host."""
        arrays = (np.array(leaf, np.float32) for leaf in jax.tree.leaves(params))
        return unflatten_dict(dict(zip(self._names, arrays, strict=True)))

    def restored(self, nested: dict) -> Tree:
        """Return the tree again, of the arrays in nested dicts."""
        by_name = flatten_dict(nested)
        return jax.tree.unflatten(self._structure, [by_name[name] for name in self._names])


def _names(path: KeyPath) -> tuple[str, ...]:
    """Return the keys of a path; none is empty or has the separator of paths on disk."""
    keys = (jax.tree_util.keystr((key,), simple=True).replace("/", ".") for key in path)
    return tuple(key or "_" for key in keys) or ("params",)
