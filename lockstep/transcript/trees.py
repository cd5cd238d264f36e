"""A tree of arrays as names and bytes: its leaves by their paths, its hash, and its file.

The file is one of safetensors: params, a snapshot's state. Equal trees are equal files, which a
content hash needs.
"""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from lockstep.errors import LockstepError, brief
from lockstep.optim.optimizer import Tree
from lockstep.transcript import tensorfile


def flatten(tree: object) -> dict[str, np.ndarray]:
    """Return the leaves of nested dicts, tuples and named tuples by their path, as in "layers/wq".

    A part of a path is a key, a field's name or a position, whatever the container, so that a
    state has the same paths before and after a checkpoint. None and empty containers have no leaf.

    Raises:
      ValueError: Two leaves would share a path, or a key is empty or contains "/".
    """
    leaves: dict[str, np.ndarray] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        path = "/".join(names)
        if path in leaves or any(not name or "/" in name for name in names):
            raise ValueError(f"ambiguous path {path!r}: keys must be unique, not empty, without /")
        leaves[path] = np.asarray(leaf)
    return leaves


def tree_hash(tree: object) -> str:
    """Return a tree's hash in hex: SHA-256 over the leaves sorted by path.

    For each leaf, its path, dtype, shape and bytes (C order, little-endian), each after its length
    as a little-endian u64, so that no two sets of leaves give the same stream.

    Raises:
      ValueError: A leaf is not an array of numbers, or see `flatten`.
    """
    digest = hashlib.sha256()
    for path, array in sorted(flatten(tree).items()):
        if array.dtype.hasobject or array.dtype.kind in "SUMm":
            raise ValueError(f"{path!r} has dtype {array.dtype}, expected numbers")
        if array.dtype.str.startswith(">"):
            array = array.astype(array.dtype.newbyteorder("<"))
        shape = ",".join(map(str, array.shape))
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # hashed without a copy
        for part in (path.encode(), array.dtype.name.encode(), shape.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def save_tree(path: Path, tree: Tree) -> None:
    """Write the arrays of a tree to one safetensors file, named by their paths joined with "/"."""
    arrays = flatten(tree)
    tensorfile.write(path, _specs(arrays), lambda name: tensorfile.pieces(arrays[name]))


def saved_bytes(tree: Tree) -> int:
    """Return the size of the file that `save_tree` writes."""
    return tensorfile.file_bytes(_specs(flatten(tree)))


def _specs(arrays: Mapping[str, np.ndarray]) -> dict[str, tensorfile.TensorSpec]:
    return {name: tensorfile.spec_of(array.dtype, array.shape) for name, array in arrays.items()}


def load_tree(path: Path, like: Tree) -> Tree:
    """Read what `save_tree` wrote, in the structure of `like`; errors as in `fitted`."""
    return jax.tree.map(np.array, fitted(_plain_file(path), like, path))


def fitted(arrays: Mapping[str, np.ndarray], like: Tree, path: Path) -> Tree:
    """Return a tree of arrays, given by their paths joined with "/", in the structure of `like`.

    `path` is where they were read, for errors.

    Raises:
      LockstepError: A tensor is missing, unexpected, of another shape or dtype than in `like`, or
        has an infinite value or NaN, with which no training goes on.
    """
    expected = flatten(like)
    for name in sorted(arrays.keys() | expected.keys()):
        if name not in arrays or name not in expected:
            problem = "missing" if name in expected else "not expected"
            raise LockstepError(f"{path}: tensor {name} is {problem}")
        actual, wanted = (f"{a.dtype}{list(a.shape)}" for a in (arrays[name], expected[name]))
        if actual != wanted and not (is_blob(arrays[name]) and is_blob(expected[name])):
            raise LockstepError(f"{path}: tensor {name} is {actual}, expected {wanted}")
        if not (finite := np.isfinite(arrays[name])).all():
            worst = arrays[name][~finite][0]
            raise LockstepError(f"{path}: tensor {name} has a value of {worst}, expected numbers")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def is_blob(array: np.ndarray) -> bool:
    """Return whether a tree's array is bytes of any length, as the state of a user's optimizer."""
    return array.dtype == np.uint8 and len(array.shape) == 1


def load_nested(path: Path) -> dict:
    """Read a tree of nested dicts, such as params, that `save_tree` wrote.

    Raises:
      LockstepError: The file is not a safetensors file, or has a tensor within another.
    """
    arrays = load_arrays(path)
    names = sorted(tuple(name.split("/")) for name in arrays)
    for name, following in pairwise(names):
        if following[: len(name)] == name:
            inner, outer = ("/".join(parts) for parts in (following, name))
            raise LockstepError(
                f"{path}: has {inner!r}, but {outer!r} is a tensor, expected one of them"
            )
    return unflatten_dict(arrays, sep="/")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a tree's safetensors file into memory, by their names.

    Raises:
      LockstepError: The file is not a safetensors file, or has a dtype that NumPy has not.
    """
    return {name: np.array(tensor) for name, tensor in _plain_file(path).items()}


def _plain_file(path: Path) -> tensorfile.TensorFile:
    """Return a file of `save_tree`, which has arrays alone: its hash is that of the arrays."""
    file = tensorfile.TensorFile(path)
    if file.metadata:
        metadata = brief(repr(file.metadata))
        raise LockstepError(f"{path}: metadata {metadata}, expected none")
    return file
