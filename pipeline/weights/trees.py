"""A tree of arrays as one safetensors file: params, a snapshot's state.

Equal trees are equal files, which a content hash needs.
"""

from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.weights import tensorfile
from pipeline.wire.commitment import flatten


def save_tree(path: Path, tree: Tree) -> None:
    """Write the arrays of a tree to one safetensors file, named by their paths joined with "/"."""
    arrays = flatten(tree)
    specs = {name: tensorfile.spec_of(array.dtype, array.shape) for name, array in arrays.items()}
    tensorfile.write(path, specs, lambda name: tensorfile.pieces(arrays[name]))


def load_tree(path: Path, like: Tree) -> Tree:
    """Read what `save_tree` wrote, in the structure of `like`.

    Raises:
      LockstepError: A tensor is missing, unexpected, or of another shape or dtype than in `like`.
    """
    arrays, expected = _load(path), flatten(like)
    for name in sorted(arrays.keys() | expected.keys()):
        if name not in arrays or name not in expected:
            problem = "missing" if name in expected else "not expected"
            raise LockstepError(f"{path}: tensor {name} is {problem}")
        actual, wanted = (f"{a.dtype}{list(a.shape)}" for a in (arrays[name], expected[name]))
        if actual != wanted:
            raise LockstepError(f"{path}: tensor {name} is {actual}, expected {wanted}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def load_nested(path: Path) -> dict:
    """Read nested dicts, such as params, that `save_tree` wrote.

    Raises:
      LockstepError: The file is not a safetensors file.
    """
    return unflatten_dict(_load(path), sep="/")


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise LockstepError(f"{path}: expected a safetensors file: {error}") from error
