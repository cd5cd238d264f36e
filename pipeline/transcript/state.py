"""The whole state of a training, and its hashes."""

from typing import NamedTuple

from pipeline.optim.optimizer import Tree
from pipeline.wire.commitment import tree_hash


class State(NamedTuple):
    """The state on the host: what snapshots and checkpoints hold.

    params: what all peers agree on; shared: the optimizer's one copy; own: one tree per peer.
    """

    params: Tree
    shared: Tree
    own: tuple[Tree, ...]


def hashes(state: State) -> dict:
    """The hashes of a state's parts, as a snapshot records them."""
    return {
        "params": tree_hash(state.params),
        "shared": tree_hash(state.shared),
        "own": [tree_hash(own) for own in state.own],
    }
