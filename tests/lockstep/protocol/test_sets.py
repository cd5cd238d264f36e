"""Filters: Psyche's golden bit, no false "no", the promised rate of false "yes"; Merkle roots."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol import sets
from lockstep.protocol.filters import PRIME
from lockstep.protocol.sets import BITS, KEYS, Bloom

BYTES = st.binary(max_size=40)


def fnv1a(data: bytes, key: int) -> int:
    """The 64-bit FNV-1a hash of `data`, with `key` in place of FNV's offset basis."""
    state = key
    for byte in data:
        state = (state ^ byte) * PRIME % 2**64
    return state


def items(start: int, count: int) -> list[bytes]:
    return [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(start, start + count)]


def test_hash_and_bit_are_psyches():
    assert fnv1a(bytes([1, 2, 3]), 1) == 1912050721080479
    bits = bytearray(1024 // 8)
    bits[159 // 8] = 1 << 159 % 8
    asked = [bytes([1, 2, 3]), bytes([1, 2, 4])]
    assert Bloom((1,), bytes(bits)).holds(asked) == [True, False]


def alike(size: int) -> st.SearchStrategy:
    """Two lists of items of one size."""
    some = st.lists(st.binary(min_size=size, max_size=size))
    return st.tuples(some, some)


@given(lists=st.integers(0, 40).flatmap(alike), seed=BYTES)
def test_many_items_at_once_give_the_bits_that_each_gives_alone(lists, seed):
    held, asked = lists
    bloom = Bloom.of(held, seed)
    places = {item: {fnv1a(item, key) % BITS for key in bloom.keys} for item in held + asked}
    bits = {i for i in range(BITS) if bloom.bits[i // 8] >> i % 8 & 1}
    assert bits == set().union(*(places[item] for item in held))
    assert bloom.holds(held + asked) == [places[item] <= bits for item in held + asked]


def test_keys_are_pinned_and_differ_by_seed():
    digest = hashlib.sha256(b"seed\x07").digest()
    assert Bloom.of((), b"seed").keys[7] == int.from_bytes(digest[:8], "little")
    keys = [key for seed in (b"", b"a", b"b") for key in Bloom.of((), seed).keys]
    assert len(set(keys)) == 3 * KEYS


def test_fewer_than_one_stranger_in_100_passes_among_256():
    filters = [Bloom.of(items(1000 * i, 256), i.to_bytes(4, "little")) for i in range(40)]
    passed = [is_in for bloom in filters for is_in in bloom.holds(items(10**6, 1000))]
    assert 0.005 < sum(passed) / len(passed) < 0.01  # expected: 0.0085


# ---- Merkle roots, by hand ----


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_root_of_three_items_pairs_the_last_with_itself():
    a, b, c = (sha(b"\x00" + item) for item in (b"a", b"b", b"c"))
    expected = sha(b"\x01" + sha(b"\x01" + a + b) + sha(b"\x01" + c + c))
    assert sets.root([b"a", b"b", b"c"]) == expected


def test_root_of_one_item_is_its_leaf_and_of_none_is_zeros():
    assert sets.root([b"a"]) == sha(b"\x00a")
    assert sets.root([]) == bytes(32)
