"""Roots by hand, every proof of every tree, and every way to tamper with one."""

import hashlib

import pytest

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


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 33])
def test_every_item_has_a_proof_that_holds(count):
    tree = items(count)
    root = merkle.root(tree)
    for index, item in enumerate(tree):
        assert merkle.verify(root, item, index, count, merkle.proof(tree, index))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 256])
def test_proofs_of_all_items_are_those_of_each(count):
    tree = items(count)
    root, proofs = merkle.root(tree), merkle.proofs(tree)
    assert proofs == [merkle.proof(tree, index) for index in range(count)]
    for index, (item, proof) in enumerate(zip(tree, proofs, strict=True)):
        assert merkle.verify(root, item, index, count, proof)


@pytest.mark.parametrize("count", [2, 3, 7, 11])
def test_tampered_proof_does_not_hold(count):
    tree = items(count)
    root = merkle.root(tree)
    for index, item in enumerate(tree):
        proof = merkle.proof(tree, index)
        flipped = bytes([proof[0][0] ^ 1]) + proof[0][1:]
        assert not merkle.verify(root, b"other", index, count, proof)
        assert not merkle.verify(root, item, (index + 1) % count, count, proof)
        assert not merkle.verify(root, item, index, count, (flipped, *proof[1:]))
        assert not merkle.verify(root, item, index, count, proof[:-1])
        assert not merkle.verify(root, item, index, count, (*proof, proof[-1]))
        assert not merkle.verify(sha(root), item, index, count, proof)


def test_item_cannot_be_proved_where_there_is_none():
    # [a, b, c] and [a, b, c, c] share a root, so the count decides.
    three, four = items(3), [*items(3), items(3)[2]]
    root = merkle.root(three)
    assert root == merkle.root(four)
    assert merkle.verify(root, four[3], 3, 4, merkle.proof(four, 3))
    assert not merkle.verify(root, four[3], 3, 3, merkle.proof(four, 3))
    assert not merkle.verify(root, four[0], -4, 4, merkle.proof(four, 0))


def test_odd_node_takes_no_sibling_but_itself():
    # A forged root over [a, b, c, d] must not pass for a tree of three.
    root, proof = merkle.root(items(4)), merkle.proof(items(4), 2)
    assert merkle.verify(root, items(4)[2], 2, 4, proof)
    assert not merkle.verify(root, items(4)[2], 2, 3, proof)


def test_node_cannot_pass_for_an_item():
    a, b = merkle.leaf_hash(b"a"), merkle.leaf_hash(b"b")
    assert merkle.root([b"a", b"b"]) != merkle.root([a + b])


def test_proof_of_a_missing_item_is_refused():
    with pytest.raises(IndexError, match="no item 3 in a tree of 3"):
        merkle.proof(items(3), 3)
