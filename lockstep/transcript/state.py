"""The whole state of a training, and its hashes."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from lockstep.machine import cores
from lockstep.optim.optimizer import Tree
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.transcript.trees import tree_hash


class State(NamedTuple):
    """The state on the host, as snapshots and checkpoints hold it.

    params: Params that all peers agree on. shared: The optimizer's one copy. own: A tree per peer,
    or None of a peer that lives elsewhere.
    """

    params: Tree
    shared: Tree
    own: tuple[Tree | None, ...]

    def not_finite(self) -> list[str]:
        """Return which of the state's arrays hold an infinity or a NaN, which training keeps."""
        return [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, leaf in jax.tree.leaves_with_path(self)
            if not np.isfinite(leaf).all()
        ]


class StateHashes(Table):
    """state.json of a snapshot: the hashes that peers commit to."""

    step: int
    """The step after which the snapshot was taken."""
    params: Hash
    """Hash of what all peers agree on."""
    shared: Hash
    """Hash of the optimizer's one copy."""
    own: tuple[Hash | None, ...]
    """Hash of what each peer owns; null where nobody told it."""


def hashes(step: int, state: State, remote: Mapping[int, Hash] | None = None) -> StateHashes:
    """Return the hashes of a state, as the snapshot after `step` records them; on all cores.

    `remote` are the hashes of what peers own that live elsewhere.
    """
    with ThreadPoolExecutor(cores.count()) as pool:
        params, shared, *own = pool.map(_hash, (state.params, state.shared, *state.own))
    remote = remote or {}
    own = [remote.get(peer) if digest is None else digest for peer, digest in enumerate(own)]
    return StateHashes(step=step, params=params, shared=shared, own=tuple(own))


def _hash(tree: Tree | None) -> Hash | None:
    return None if tree is None else tree_hash(tree)
