"""Trees on disk: one safetensors file of stable bytes, or a training's resumable checkpoints.

Snapshots, params and exports are safetensors: equal arrays are equal files, which a content hash
needs. Checkpoints in progress go through orbax, which saves while training goes on.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.weights import tensorfile
from pipeline.wire.commitment import flatten, tree_hash

log = logging.getLogger(__name__)


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


class Saved(NamedTuple):
    """A checkpoint: after which step, the state, and what else training needs to go on."""

    step: int
    state: Tree
    rest: dict


class Checkpoints:
    """A training's checkpoints in a folder, the newest few.

    Orbax loads a flipped bit without a word, so each checkpoint carries the hash of its state.

    Args:
      folder: where they lie.
      keep: how many are kept.
    """

    def __init__(self, folder: Path, keep: int):
        from orbax.checkpoint import v1 as ocp

        self.folder = folder
        policy = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(), preservation_policy=policy
        )

    def save(self, step: int, state: Tree, rest: dict) -> None:
        """Begins to save the state after `step`, once the save before it is done."""
        rest = rest | {"sha256": tree_hash(state)}
        with self._one_line():
            self._checkpointer.save_checkpointables_async(
                step,
                {"state": state, "rest": {"json": json.dumps(rest)}},
                overwrite=True,
                force=True,  # else it is skipped where the one before is not done yet
            )

    def newest(self, like: Tree) -> Saved | None:
        """The newest checkpoint whose bytes are as saved, in the structure of `like`."""
        for checkpoint in reversed(self._checkpointer.checkpoints):
            loaded: dict[str, Any] = self._checkpointer.load_checkpointables(
                checkpoint.step, {"state": like, "rest": None}
            )
            state = jax.tree.map(np.asarray, loaded["state"])
            rest = json.loads(loaded["rest"]["json"])
            if tree_hash(state) == rest.pop("sha256"):
                return Saved(checkpoint.step, state, rest)
            log.warning(f"train: checkpoint {checkpoint.step} is damaged; trying the one before it")
        return None

    def close(self) -> None:
        """Waits for the last save."""
        with self._one_line():
            self._checkpointer.close()

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """A save fails in the background, and speaks at the next call: most often a full disk."""
        try:
            yield
        except Exception as error:  # orbax's, tensorstore's and the system's: many kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LockstepError(
                f"{self.folder}: {reason}, expected to write a checkpoint there"
            ) from error
