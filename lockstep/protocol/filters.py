"""The bits of Bloom filters, of all items at once: with 256 peers these are most of a round.

Items are of one length, and a key takes the place of FNV-1a's offset basis: for each byte, from
state = key, state <- (state xor byte) PRIME mod 2^64.

Shapes in names: N items, L bytes of each, K keys.
"""

from functools import lru_cache

import numpy as np

PRIME = 0x100000001B3  # FNV's, of 41 bits
LOW = 256  # keys of one byte


def bits_of(items: tuple[bytes, ...], keys: tuple[int, ...], size: int) -> bytes:
    """Return the Bloom filter of `size` bits, by these keys, that holds some items."""
    is_set = np.zeros(size, np.uint8)
    is_set[_places(items, keys, size)] = 1
    return np.packbits(is_set, bitorder="little").tobytes()


def holds(bits: bytes, items: tuple[bytes, ...], keys: tuple[int, ...]) -> list[bool]:
    """Return for each item whether a Bloom filter by these keys holds it."""
    is_set = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little") == 1
    found: list[bool] = is_set[_places(items, keys, len(is_set))].all(axis=1).tolist()
    return found


def _places(items: tuple[bytes, ...], keys: tuple[int, ...], size: int) -> np.ndarray:
    """Return the bit of each item by each key, in a Bloom filter of so many bits: [N, K].

    A key's upper bytes only add a constant to a hash, so hashes of the 256 lowest bytes serve all
    keys: fnv1a(item, key) = fnv1a(item, key mod 256) + (key - key mod 256) PRIME^len(item) mod 2^64
    """
    length = np.uint64(pow(PRIME, len(items[0]) if items else 0, 2**64))
    keys_K = np.array(keys, np.uint64)
    low_K = keys_K % np.uint64(LOW)
    hashes_NK = _low_hashes(items)[:, low_K] + (keys_K - low_K) * length
    return hashes_NK % np.uint64(size)


@lru_cache(maxsize=4)  # of the peers, and of the round's commitments
def _low_hashes(items: tuple[bytes, ...]) -> np.ndarray:
    """Return each item's FNV-1a with each of a filter's keys of one byte: [N, 256]."""
    length = len(items[0]) if items else 0
    bytes_NL = np.frombuffer(b"".join(items), np.uint8).reshape(len(items), length)
    state = np.tile(np.arange(LOW, dtype=np.uint64), (len(items), 1))
    for bytes_N in bytes_NL.T.astype(np.uint64):
        state ^= bytes_N[:, None]
        state *= np.uint64(PRIME)
    return state
