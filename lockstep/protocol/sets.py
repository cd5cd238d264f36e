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

import numpy as np

KEYS = 8
BITS = 2560  # (1 - exp(-8 x 256 / 2560))^8 = 0.85 %
U64 = (1 << 64) - 1
PRIME = 0x100000001B3  # FNV's, of 41 bits
LOW = 256  # keys of one byte, below which others are alike


def fnv1a(data: bytes, key: int) -> int:
    """Return the 64-bit FNV-1a hash of `data`, with `key` in place of FNV's offset basis."""
    state = key
    for byte in data:
        state = (state ^ byte) * PRIME & U64
    return state


@lru_cache(maxsize=128)
def keys(seed: bytes) -> tuple[int, ...]:
    """Return the keys of the filter with this seed; Psyche draws them at random.

    Key i is the first 8 bytes, little-endian, of SHA-256(seed + the byte i).
    """
    digests = [hashlib.sha256(seed + bytes([i])).digest() for i in range(KEYS)]
    return tuple([int.from_bytes(digest[:8], "little") for digest in digests])


@lru_cache(maxsize=256)
def participant(peer: int) -> bytes:
    """Return a peer's item in a witness's filter: SHA-256 of its number, u32 little-endian."""
    return hashlib.sha256(peer.to_bytes(4, "little")).digest()


@dataclass(frozen=True)
class Bloom:
    """A set of byte strings with false positives."""

    keys: tuple[int, ...] = field(repr=False)  #: `KEYS` unsigned 64-bit integers.
    #: `BITS` // 8 bytes; bit i is bit i % 8 of byte i // 8. Psyche's size works too.
    bits: bytes = field(repr=False)

    @classmethod
    def of(cls, items: Iterable[bytes], seed: bytes) -> "Bloom":
        """Return the filter that holds `items`; the seed determines its keys."""
        return _of(tuple(items), keys(seed))

    def holds(self, items: Sequence[bytes]) -> list[bool]:
        """Return for each item whether it is in the set."""
        is_set = np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little") == 1
        found: list[bool] = is_set[_places(tuple(items), self.keys, len(is_set))].all(1).tolist()
        return found


@dataclass(frozen=True)
class ExactSet:
    """A set of byte strings without false positives; asked like a `Bloom`."""

    items: frozenset[bytes]

    def holds(self, items: Sequence[bytes]) -> list[bool]:
        """Return for each item whether it is in the set."""
        return [item in self.items for item in items]


@lru_cache(maxsize=128)  # two for each of 32 witnesses: written, then read, then audited
def _of(items: tuple[bytes, ...], keys: tuple[int, ...]) -> Bloom:
    is_set = np.zeros(BITS, np.uint8)
    is_set[_places(items, keys, BITS)] = 1
    return Bloom(keys, np.packbits(is_set, bitorder="little").tobytes())


def _places(items: tuple[bytes, ...], keys: tuple[int, ...], size: int) -> np.ndarray:
    """Return the bit of each item by each key, in a filter of so many bits: [items, keys].

    A key's upper bytes only add a constant to a hash, so hashes of the 256 lowest bytes serve all
    keys: fnv1a(item, key) = fnv1a(item, key mod 256) + (key - key mod 256) PRIME^len(item) mod 2^64
    """
    if len(set(map(len, items))) != 1:
        hashes = [[fnv1a(item, key) for key in keys] for item in items]
        return np.array(hashes, np.uint64).reshape(-1, len(keys)) % np.uint64(size)
    length = np.uint64(pow(PRIME, len(items[0]), U64 + 1))
    keys_K = np.array(keys, np.uint64)
    low_K = keys_K % np.uint64(LOW)
    hashes_NK = _low_hashes(items)[:, low_K] + (keys_K - low_K) * length
    return hashes_NK % np.uint64(size)


@lru_cache(maxsize=4)  # of the peers, and of the round's commitments
def _low_hashes(items: tuple[bytes, ...]) -> np.ndarray:
    """Return each item's FNV-1a with each key of one byte: [items, 256].

    All at once, by arrays: with 256 peers this is most of a round.
    """
    rows = np.frombuffer(b"".join(items), np.uint8).reshape(len(items), len(items[0]))
    state = np.tile(np.arange(LOW, dtype=np.uint64), (len(items), 1))
    for column in rows.T.astype(np.uint64):
        state ^= column[:, None]
        state *= np.uint64(PRIME)
    return state


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
