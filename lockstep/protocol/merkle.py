"""Merkle roots over commitments, and over the pieces of a message; paths from a piece to a root.

leaf = SHA-256(0x00 + item), node = SHA-256(0x01 + left + right). Without the prefixes a forger
could pass off a node as a leaf. The last node of an odd level is paired with itself, as in Psyche
and Solana.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

EMPTY = bytes(32)  # the root of no items, which no item can have


def leaf_hash(item: bytes | memoryview) -> bytes:
    """Return SHA-256(0x00 + item)."""
    return hashlib.sha256(b"\x00" + item).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return SHA-256(0x01 + left + right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(items: Sequence[bytes]) -> bytes:
    """Return the 32-byte root over `items` in their order, or `EMPTY` without items."""
    return _root(tuple(items)) if items else EMPTY


@lru_cache(maxsize=8)  # witnesses hold much the same messages
def _root(items: tuple[bytes, ...]) -> bytes:
    return MerkleTree.over(items).root


@dataclass(frozen=True)
class MerkleTree:
    """All nodes over some items.

    Attributes:
      levels: Hashes of each level, from the leaves to the root.
    """

    levels: tuple[list[bytes], ...]

    @classmethod
    def over(cls, items: Iterable[bytes | memoryview]) -> "MerkleTree":
        """Return the tree over one or more items, in their order."""
        levels = [[leaf_hash(item) for item in items]]
        while len(level := levels[-1]) > 1:
            pairs = zip(level[::2], level[1::2] + level[-1:], strict=False)
            levels.append([node_hash(left, right) for left, right in pairs])
        return cls(tuple(levels))

    @property
    def root(self) -> bytes:
        """The root, 32 bytes."""
        return self.levels[-1][0]

    def path(self, index: int) -> list[bytes]:
        """Return the sibling of each node from an item's leaf to below the root: `depth` hashes."""
        siblings = []
        for level, _ in pairwise(self.levels):
            siblings.append(level[min(index ^ 1, len(level) - 1)])
            index //= 2
        return siblings


def depth(count: int) -> int:
    """Return the number of hashes in a path of a tree over `count` items."""
    return (count - 1).bit_length()


def root_above(item: bytes, index: int, path: Sequence[bytes]) -> bytes:
    """Return the root to which a path leads from the item at an index."""
    node = leaf_hash(item)
    for sibling in path:
        node = node_hash(sibling, node) if index % 2 else node_hash(node, sibling)
        index //= 2
    return node
