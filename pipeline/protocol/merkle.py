"""Merkle trees over commitments, and proofs that one commitment stands under a root.

leaf = SHA-256(0x00 + item), node = SHA-256(0x01 + left + right); the two prefixes keep a node from
passing for a leaf. The last node of an odd level is paired with itself, as in Psyche and Solana.
"""

import hashlib
from collections.abc import Sequence

EMPTY = bytes(32)  # the root of no items, which no item can have


def leaf_hash(item: bytes) -> bytes:
    """Return SHA-256(0x00 + item)."""
    return hashlib.sha256(b"\x00" + item).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return SHA-256(0x01 + left + right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(items: Sequence[bytes]) -> bytes:
    """Return the 32-byte root over `items` in their order, or `EMPTY` when there are none."""
    return _levels(items)[-1][0] if items else EMPTY


def proof(items: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the siblings on the way from item `index` to the root, lowest first.

    Raises:
      IndexError: There is no item `index`.
    """
    if not 0 <= index < len(items):
        raise IndexError(f"no item {index} in a tree of {len(items)}")
    return _path(_levels(items)[:-1], index)


def proofs(items: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Return every item's `proof`, in order; the tree is built once."""
    levels = _levels(items)[:-1]
    return [_path(levels, index) for index in range(len(items))]


def verify(root: bytes, item: bytes, index: int, count: int, proof: Sequence[bytes]) -> bool:
    """Return whether `proof` shows that `item` is item `index` of the `count` under `root`.

    The count matters: pairing an odd node with itself gives [a, b, c] and [a, b, c, c] one root, so
    without it a proof could place an item where there is none.
    """
    if not 0 <= index < count:
        return False
    here, siblings = leaf_hash(item), iter(proof)
    while count > 1:
        sibling = next(siblings, None)
        if sibling is None or (index ^ 1 >= count and sibling != here):
            return False
        here = node_hash(sibling, here) if index % 2 else node_hash(here, sibling)
        index, count = index // 2, (count + 1) // 2
    return next(siblings, None) is None and here == root


def _levels(items: Sequence[bytes]) -> list[list[bytes]]:
    levels = [[leaf_hash(item) for item in items]]
    while len(level := levels[-1]) > 1:
        pairs = zip(level[::2], level[1::2] + level[-1:], strict=False)
        levels.append([node_hash(left, right) for left, right in pairs])
    return levels


def _path(levels: list[list[bytes]], index: int) -> tuple[bytes, ...]:
    """The siblings of item `index`, one from each level below the root."""
    places = ((level, index >> height) for height, level in enumerate(levels))
    return tuple(level[min(place ^ 1, len(level) - 1)] for level, place in places)
