"""Merkle roots over commitments.

leaf = SHA-256(0x00 + item), node = SHA-256(0x01 + left + right); the two prefixes keep a node from
passing for a leaf. The last node of an odd level is paired with itself, as in Psyche and Solana.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

EMPTY = bytes(32)  # the root of no items, which no item can have


def leaf_hash(item: bytes) -> bytes:
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
    level = [leaf_hash(item) for item in items]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2] + level[-1:], strict=False)
        level = [node_hash(left, right) for left, right in pairs]
    return level[0]
