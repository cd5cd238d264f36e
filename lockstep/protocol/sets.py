"""A set in few bytes: as Psyche's Bloom filter, and as a Merkle root.

The filter has no false negatives, and fewer than 1 % false positives even with 256 items in its 320
bytes. Psyche promises the same 1 % but gives every filter 1,024 bits: 31 % at 256 items.

In the tree leaf = SHA-256(0x00 + item) and node = SHA-256(0x01 + left + right).
Without the prefixes a forger could pass off a node as a leaf. The last node of an odd level is
paired with itself, as in Psyche and Solana.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

KEYS = 8
BITS = 2560  # (1 - exp(-8 x 256 / 2560))^8 = 0.85 %
U64 = (1 << 64) - 1
PRIME = 0x100000001B3  # FNV's, of 41 bits
LANE = (1).to_bytes(16, "little")  # a hash, with room for a hash times PRIME


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
    digests = (hashlib.sha256(seed + bytes([i])).digest() for i in range(KEYS))
    return tuple(int.from_bytes(digest[:8], "little") for digest in digests)


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
        queries, size = tuple(items), 8 * len(self.bits)
        is_set = [byte >> bit & 1 for byte in self.bits for bit in range(8)]
        by_key = [[is_set[found % size] for found in _hashes(queries, key)] for key in self.keys]
        return [all(found) for found in zip(*by_key, strict=True)]


@dataclass(frozen=True)
class ExactSet:
    """A set of byte strings without false positives; asked like a `Bloom`."""

    items: frozenset[bytes]

    def holds(self, items: Sequence[bytes]) -> list[bool]:
        """Return for each item whether it is in the set."""
        return [item in self.items for item in items]


@lru_cache(maxsize=128)  # two for each of 32 witnesses: written, then read, then audited
def _of(items: tuple[bytes, ...], keys: tuple[int, ...]) -> Bloom:
    bits = bytearray(BITS // 8)
    for position in {h % BITS for key in keys for h in _hashes(items, key)}:
        bits[position // 8] |= 1 << position % 8
    return Bloom(keys, bytes(bits))


def _hashes(items: tuple[bytes, ...], key: int) -> Sequence[int]:
    """Return each item's FNV-1a hash with a key.

    A key's upper bytes only add a constant to a hash, so hashes of the 256 lowest bytes serve all
    keys: fnv1a(item, key) = fnv1a(item, key mod 256) + (key - key mod 256) PRIME^len(item) mod 2^64
    """
    if len(set(map(len, items))) != 1:
        return [fnv1a(item, key) for item in items]
    offset = (key - key % 256) * pow(PRIME, len(items[0]), U64 + 1) & U64
    return [low + offset & U64 for low in _low_hashes(items, key % 256)]


@lru_cache(maxsize=512)  # by each lowest byte: of the peers, and of the round's commitments
def _low_hashes(items: tuple[bytes, ...], key: int) -> "array[int]":
    """Return each item's FNV-1a with a key of one byte, all at once: each has a lane of an integer.

    Python's long integers do the loop over peers in C: with 256 peers this is most of a round.
    """
    lanes = int.from_bytes(LANE * len(items), "little")  # a 1 in each
    state, mask = lanes * key, lanes * U64
    for row in _rows(items):
        state = (state ^ row) * PRIME & mask
    return array("Q", state.to_bytes(len(LANE) * len(items), "little"))[::2]


@lru_cache(maxsize=4)
def _rows(items: tuple[bytes, ...]) -> list[int]:
    """Return all items' first bytes as lanes of one integer; their second bytes; and so on."""
    data, length = b"".join(items), len(items[0])
    row, rows = bytearray(len(LANE) * len(items)), []
    for place in range(length):
        row[:: len(LANE)] = data[place::length]
        rows.append(int.from_bytes(row, "little"))
    return rows


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
