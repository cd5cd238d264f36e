"""The examples that peers train on, by data, seed, peer and place in the run's order alone.

Place p is example `permute(p mod n)` of the n there are, anew for each pass over them. A dataset is
read again in each pass, with Python's, NumPy's and torch's global generators seeded by the place,
so that what it draws, such as a random transform of a picture, is another in each pass.
"""

import hashlib
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import jax
import numpy as np

from lockstep.errors import LockstepError, expecting
from lockstep.optim.optimizer import Tree
from lockstep.programs.permutation import permute
from lockstep.python.lockstep_torch.bits import seed_generators
from lockstep.simulation.arguments import check_call
from lockstep.simulation.loss_task import PeerRows

BLOCK = 2048  # places that are shuffled at once: neighbours are read soon
NO_NUMBERS = "OSUMm"  # kinds of dtypes: objects, texts and times
Subset = Literal["train", "eval"]
Factory = Callable[[int, int, Subset], Any]
"""factory(peer, num_peers, split) -> a tree of arrays or a dataset."""


class ExampleSet:
    """Examples by their index: of a tree of arrays with a leading axis, or of a dataset.

    A dataset has a length, and gives a tree of arrays for an index; `seed` is that of what it draws
    while it is read. Errors call the data `name`.
    """

    def __init__(self, data: Any, name: str, seed: int):
        self.name, self.seed, self._arrays, self._dataset = name, seed, None, None
        # A list of trees is a dataset, even if all of its arrays have one length.
        listed = isinstance(data, list) and any(isinstance(x, dict | list | tuple) for x in data)
        leaves = [] if listed else jax.tree.leaves(data)
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves if _is_array(leaf)}
        if leaves and all(map(_is_array, leaves)) and len(lengths) == 1 and None not in lengths:
            self._arrays = jax.tree.map(_on_host, data)
            self.count = lengths.pop()
        elif (
            hasattr(data, "__len__")
            and hasattr(data, "__getitem__")
            and not isinstance(data, dict | jax.Array | np.ndarray)
        ):
            self._dataset, self.count = data, len(data)
        elif len(lengths) > 1:
            shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves)
            raise LockstepError(
                f"simulate: {name} has arrays of shapes {shapes}, expected one length of their "
                "leading axes"
            )
        else:
            raise LockstepError(
                f"simulate: {name} is {type(data).__name__}, expected arrays with a leading axis "
                "of examples, a dataset with a length and items, or factory(peer, num_peers, split)"
            )
        if not self.count:
            raise LockstepError(f"simulate: {name} has no examples, expected at least one")
        for leaf in jax.tree.leaves(self.take(np.zeros(1, np.int64))):
            if leaf.dtype.kind in NO_NUMBERS:
                raise LockstepError(
                    f"simulate: {name} has items of {leaf.dtype}, expected arrays of numbers"
                )

    def take(self, index_N: np.ndarray, place_N: np.ndarray | None = None) -> Tree:
        """Return the examples at these indices, read for these places: arrays [N, ...]."""
        if self._dataset is None:
            return jax.tree.map(lambda leaf: leaf[index_N], self._arrays)
        items = []
        for index, place in zip(index_N, index_N if place_N is None else place_N, strict=True):
            digest = hashlib.sha256(f"lockstep/read:{self.seed}:{self.name}:{place}".encode())
            seed_generators(int.from_bytes(digest.digest()[:4], "little"))
            items.append(self._dataset[int(index)])
        with expecting(f"simulate: {self.name}", "items of equal shapes", ValueError):
            return jax.tree.map(lambda *leaves: np.stack([_on_host(x) for x in leaves]), *items)


class PeerData:
    """One peer's examples, in the order of the run; `Rows`. Not shuffled, they come as they are."""

    def __init__(self, examples: ExampleSet, peer: int, seed: int, *, shuffle: bool):
        self.examples, self.peer, self.seed, self.shuffle = examples, peer, seed, shuffle

    def take(self, indices_N: np.ndarray) -> PeerRows:
        """Return a peer's examples at these places of the run's order."""
        place_N = np.asarray(indices_N, np.int64)
        if self.shuffle:
            block_N, index_N = np.divmod(place_N, BLOCK)
            for number in {*block_N.tolist()}:
                mask = block_N == number
                index_N[mask] = _shuffled(self.seed, self.examples.count, number)[index_N[mask]]
        else:
            index_N = place_N % self.examples.count
        peer_N = np.full(len(index_N), self.peer, np.int32)
        return PeerRows(self.examples.take(index_N, place_N), peer_N)


@lru_cache(maxsize=512)  # blocks of 16 kB, two for each of 256 peers
def _shuffled(seed: int, count: int, block: int) -> np.ndarray:
    """Return which of so many examples are at the places of a block of the shuffled order."""
    pass_N, index_N = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), count)
    for number in np.unique(pass_N):
        mask = pass_N == number
        digest = hashlib.sha256(f"lockstep/simulate:{seed}:{number}".encode()).digest()
        index_N[mask] = permute(digest, index_N[mask], count)
    return index_N


def data_of_peers(train_data: Any, peers: int, seed: int, *, shuffle: bool) -> list[PeerData]:
    """Return the examples of each peer: its own where a factory makes them, else the same."""
    if _is_factory(train_data):
        sets = [
            ExampleSet(
                _made(train_data, "train_data", peer, peers), f"train_data of peer {peer}", seed
            )
            for peer in range(peers)
        ]
    else:
        sets = [ExampleSet(train_data, "train_data", seed)] * peers
    return [PeerData(data, peer, seed, shuffle=shuffle) for peer, data in enumerate(sets)]


def held_out(train_data: Any, eval_data: Any, peers: int, seed: int) -> ExampleSet | None:
    """Return the examples that the loss is measured on; a factory is called with split "eval"."""
    if eval_data is None and _is_factory(train_data):
        eval_data = train_data
    if _is_factory(eval_data):
        eval_data = _made(eval_data, "eval_data", 0, peers)
    return None if eval_data is None else ExampleSet(eval_data, "eval_data", seed)


def _made(factory: Factory, name: str, peer: int, peers: int) -> Any:
    split: Subset = "train" if name == "train_data" else "eval"
    check_call(factory, name, "factory(peer, num_peers, split)", peer, peers, split)
    return factory(peer, peers, split)


def _is_factory(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__getitem__")


def _on_host(leaf: Any) -> np.ndarray:
    """Return a leaf of examples as a NumPy array, in JAX's dtype, of 32 bits at most.

    Raises:
      LockstepError: It holds a number that this dtype does not.
    """
    if _is_tensor(leaf):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if leaf.dtype == sys.modules["torch"].bfloat16 else leaf
    array = np.asarray(leaf)
    if array.dtype.kind in NO_NUMBERS:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    exact = array.dtype.kind in "iu"
    lost = narrow != array if exact else np.isinf(narrow) & np.isfinite(array)
    if narrow.dtype != array.dtype and lost.any():
        raise LockstepError(
            f"simulate: an example holds {array[lost].flat[0]}, expected a number of {narrow.dtype}"
        )
    return narrow


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) or _is_tensor(leaf)


def _is_tensor(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)
