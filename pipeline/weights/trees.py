"""A tree of arrays as one safetensors file: params, a snapshot's state.

Equal trees are equal files, which a content hash needs.
"""

from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.weights import tensorfile
from pipeline.wire.commitment import flatten


def save_tree(path: Path, tree: Tree) -> None:
    """Writes a tree's arrays to one safetensors file, named by their paths joined with "/"."""
    arrays = flatten(tree)
    forms = {name: tensorfile.form_of(array.dtype, array.shape) for name, array in arrays.items()}
    tensorfile.write(path, forms, lambda name: tensorfile.pieces(arrays[name]))


def load_tree(path: Path, like: Tree) -> Tree:
    """Reads what `save_tree` wrote, in the structure of `like`.

    Raises:
      LockstepError: a tensor is missing, extra, or of another shape or dtype than in `like`.
    """
    found, expected = _load(path), flatten(like)
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            word = "missing" if name in expected else "not expected"
            raise LockstepError(f"{path}: tensor {name} is {word}")
        form = found[name].shape, found[name].dtype
        if form != (expected[name].shape, expected[name].dtype):
            raise LockstepError(
                f"{path}: tensor {name} is {form[1]}{list(form[0])}, expected "
                f"{expected[name].dtype}{list(expected[name].shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in expected])


def load_nested(path: Path) -> dict:
    """Reads what `save_tree` wrote of nested dicts, such as params, whatever their structure.

    Raises:
      LockstepError: it is no safetensors file.
    """
    tree: dict = {}
    for name, array in _load(path).items():
        *groups, last = name.split("/")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = array
    return tree


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise LockstepError(f"{path}: expected a safetensors file: {error}") from error
