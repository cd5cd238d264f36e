"""The whole state of a training, and its hashes."""

from typing import NamedTuple

from pipeline.optim.optimizer import Tree
from pipeline.wire.commitment import tree_hash


class State(NamedTuple):
    """The state on the host, as snapshots and checkpoints hold it.

    params: Params that all peers agree on. shared: The optimizer's one copy. own: A tree per peer.
    """

    params: Tree
    shared: Tree
    own: tuple[Tree, ...]


def hashes(state: State) -> dict:
    """Return the hashes of a state's parts, as a snapshot records them."""
    return {
        "params": tree_hash(state.params),
        "shared": tree_hash(state.shared),
        "own": [tree_hash(own) for own in state.own],
    }
