"""A set in few bytes: as Psyche's Bloom filter, and as a Merkle root.

The filter has no false negatives, and fewer than 1 % false positives even with 256 items in its 320
bytes. Psyche promises the same 1 % but gives every filter 1,024 bits: 31 % at 256 items.

In the tree leaf = SHA-256(0x00 + item) and node = SHA-256(0x01 + left + right).
Without the prefixes a forger could pass off a node as a leaf. The last node of an odd level is
paired with itself, as in Psyche and Solana.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

KEYS = 8
BITS = 2560  # (1 - exp(-8 x 256 / 2560))^8 = 0.85 %


@lru_cache(maxsize=128)
def keys(seed: bytes) -> tuple[int, ...]:
    """Return the keys of a set's Bloom filter with this seed; Psyche draws them at random.

    Key i is the first 8 bytes, little-endian, of SHA-256(seed + the byte i).
    """
    digests = [hashlib.sha256(seed + bytes([i])).digest() for i in range(KEYS)]
    return tuple([int.from_bytes(digest[:8], "little") for digest in digests])


@lru_cache(maxsize=256)
def participant(peer: int) -> bytes:
    """Return a peer's item in the set of a witness: SHA-256 of its number, u32 little-endian."""
    return hashlib.sha256(peer.to_bytes(4, "little")).digest()


@dataclass(frozen=True)
class Bloom:
    """A set of byte strings with false positives."""

    keys: tuple[int, ...] = field(repr=False)  #: `KEYS` unsigned 64-bit integers.
    #: `BITS` // 8 bytes; bit i is bit i % 8 of byte i // 8. Psyche's size works too.
    bits: bytes = field(repr=False)

    @classmethod
    def of(cls, items: Iterable[bytes], seed: bytes) -> "Bloom":
        """Return the set that holds `items`, as a filter; the seed determines its keys."""
        return _of(tuple(items), keys(seed))

    def holds(self, items: Sequence[bytes]) -> list[bool]:
        """Return for each item whether it is in the set, with false positives."""
        from lockstep.protocol import filters

        return filters.holds(self.bits, tuple(items), self.keys)


@dataclass(frozen=True)
class ExactSet:
    """A set of byte strings without false positives; asked like a `Bloom`."""

    items: frozenset[bytes]

    def holds(self, items: Sequence[bytes]) -> list[bool]:
        """Return for each item whether it is in the set, without false positives."""
        return [item in self.items for item in items]


@lru_cache(maxsize=128)  # two for each of 32 witnesses: written, then read, then audited
def _of(items: tuple[bytes, ...], keys: tuple[int, ...]) -> Bloom:
    from lockstep.protocol import filters  # only now: to import the coordinator takes no arrays

    return Bloom(keys, filters.bits_of(items, keys, BITS))


EMPTY = bytes(32)  # the root of no items, which no item can have


def leaf_hash(item: bytes) -> bytes:
    """Return the hash of a Merkle tree's leaf, SHA-256(0x00 + item)."""
    return hashlib.sha256(b"\x00" + item).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of a Merkle tree's node, SHA-256(0x01 + left + right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(items: Sequence[bytes]) -> bytes:
    """Return the 32-byte Merkle root of a set's `items` in order, or `EMPTY` without items."""
    return _root(tuple(items)) if items else EMPTY


@lru_cache(maxsize=8)  # witnesses hold much the same messages
def _root(items: tuple[bytes, ...]) -> bytes:
    level = [leaf_hash(item) for item in items]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2] + level[-1:], strict=False)
        level = [node_hash(left, right) for left, right in pairs]
    return level[0]
