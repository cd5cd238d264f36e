"""Merkle roots, by hand."""

import hashlib

import pytest

from lockstep.protocol import sets


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def items(count: int) -> list[bytes]:
    return [sha(bytes([i])) for i in range(count)]


def test_root_of_three_items_pairs_the_last_with_itself():
    a, b, c = (sha(b"\x00" + item) for item in (b"a", b"b", b"c"))
    expected = sha(b"\x01" + sha(b"\x01" + a + b) + sha(b"\x01" + c + c))
    assert sets.root([b"a", b"b", b"c"]) == expected


def test_root_of_one_item_is_its_leaf_and_of_none_is_zeros():
    assert sets.root([b"a"]) == sha(b"\x00a")
    assert sets.root([]) == bytes(32)


def test_root_depends_on_every_item_and_on_their_order():
    roots = [sets.root(items(5)), sets.root(items(5)[::-1]), sets.root(items(4))]
    assert len(set(roots)) == 3


def test_node_cannot_pass_for_an_item():
    a, b = sets.leaf_hash(b"a"), sets.leaf_hash(b"b")
    assert sets.root([b"a", b"b"]) != sets.root([a + b])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_a_path_leads_from_every_item_to_the_root_and_from_no_other(count):
    tree, every = sets.MerkleTree.over(items(count)), items(count)
    assert tree.root == sets.root(every)
    for index, item in enumerate(every):
        path = tree.path(index)
        assert len(path) == sets.depth(count)
        assert sets.root_above(item, index, path) == tree.root
        assert sets.root_above(item + b"x", index, path) != tree.root
        for level in range(len(path)):
            bent = [*path[:level], bytes(32), *path[level + 1 :]]
            assert sets.root_above(item, index, bent) != tree.root
        for other in set(range(count)) - {index}:
            assert sets.root_above(item, other, path) != tree.root
