"""The bits of Bloom filters, of all items at once: with 256 peers these are most of a round.

Shapes in names: N items, L bytes of each, K keys.
"""

from functools import lru_cache

import numpy as np

U64 = (1 << 64) - 1
PRIME = 0x100000001B3  # FNV's, of 41 bits
LOW = 256  # keys of one byte


def fnv1a(data: bytes, key: int) -> int:
    """Return the 64-bit FNV-1a hash of `data`, with `key` in place of FNV's offset basis."""
    state = key
    for byte in data:
        state = (state ^ byte) * PRIME & U64
    return state


def bits_of(items: tuple[bytes, ...], keys: tuple[int, ...], size: int) -> bytes:
    """Return the filter of `size` bits, by these keys, that holds some items."""
    is_set = np.zeros(size, np.uint8)
    is_set[_places(items, keys, size)] = 1
    return np.packbits(is_set, bitorder="little").tobytes()


def holds(bits: bytes, items: tuple[bytes, ...], keys: tuple[int, ...]) -> list[bool]:
    """Return for each item whether a filter by these keys holds it."""
    is_set = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little") == 1
    found: list[bool] = is_set[_places(items, keys, len(is_set))].all(axis=1).tolist()
    return found


def _places(items: tuple[bytes, ...], keys: tuple[int, ...], size: int) -> np.ndarray:
    """Return the bit of each item by each key, in a filter of so many bits: [N, K].

    A key's upper bytes only add a constant to a hash, so hashes of the 256 lowest bytes serve all
    keys: fnv1a(item, key) = fnv1a(item, key mod 256) + (key - key mod 256) PRIME^len(item) mod 2^64
    """
    low_hashes = _low_hashes(items)
    if low_hashes is None:
        hashes = [[fnv1a(item, key) for key in keys] for item in items]
        return np.array(hashes, np.uint64).reshape(-1, len(keys)) % np.uint64(size)
    length = np.uint64(pow(PRIME, len(items[0]), U64 + 1))
    keys_K = np.array(keys, np.uint64)
    low_K = keys_K % np.uint64(LOW)
    hashes_NK = low_hashes[:, low_K] + (keys_K - low_K) * length
    return hashes_NK % np.uint64(size)


@lru_cache(maxsize=4)  # of the peers, and of the round's commitments
def _low_hashes(items: tuple[bytes, ...]) -> np.ndarray | None:
    """Return each item's FNV-1a with each key of one byte: [N, 256]; None if lengths differ."""
    if len(set(map(len, items))) != 1:
        return None
    bytes_NL = np.frombuffer(b"".join(items), np.uint8).reshape(len(items), len(items[0]))
    state = np.tile(np.arange(LOW, dtype=np.uint64), (len(items), 1))
    for bytes_N in bytes_NL.T.astype(np.uint64):
        state ^= bytes_N[:, None]
        state *= np.uint64(PRIME)
    return state
