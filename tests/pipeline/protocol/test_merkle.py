"""Merkle roots, by hand."""

import hashlib

from pipeline.protocol import merkle


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def items(count: int) -> list[bytes]:
    return [sha(bytes([i])) for i in range(count)]


def test_root_of_three_items_pairs_the_last_with_itself():
    a, b, c = (sha(b"\x00" + item) for item in (b"a", b"b", b"c"))
    expected = sha(b"\x01" + sha(b"\x01" + a + b) + sha(b"\x01" + c + c))
    assert merkle.root([b"a", b"b", b"c"]) == expected


def test_root_of_one_item_is_its_leaf_and_of_none_is_zeros():
    assert merkle.root([b"a"]) == sha(b"\x00a")
    assert merkle.root([]) == bytes(32)


def test_root_depends_on_every_item_and_on_their_order():
    roots = [merkle.root(items(5)), merkle.root(items(5)[::-1]), merkle.root(items(4))]
    assert len(set(roots)) == 3


def test_node_cannot_pass_for_an_item():
    a, b = merkle.leaf_hash(b"a"), merkle.leaf_hash(b"b")
    assert merkle.root([b"a", b"b"]) != merkle.root([a + b])
