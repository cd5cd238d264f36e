"""A Merkle tree over the operations of a record: where two part, and what a path proves."""

from collections.abc import Callable, Iterable, Sequence

from lockstep.protocol.attestation import Hash
from lockstep.protocol.sets import leaf_hash, node_hash

MerkleTree = list[list[bytes]]  # its levels, from the leaves to the top


def leaf(*hashes: Hash) -> bytes:
    """Return the leaf of some hashes."""
    return leaf_hash(b"".join(map(bytes.fromhex, hashes)))


def tree_over(leaves: Iterable[bytes]) -> MerkleTree:
    """Return the tree over at least one leaf; the last node of an odd level pairs with itself."""
    tree = [list(leaves)]
    while len(level := tree[-1]) > 1:
        pairs = zip(level[::2], level[1::2] + level[-1:], strict=False)
        tree.append([node_hash(*pair) for pair in pairs])
    return tree


def path_of(tree: MerkleTree, number: int) -> tuple[Hash, ...]:
    """Return the nodes beside the way from a leaf to the top."""
    ways = [(level, number >> height) for height, level in enumerate(tree[:-1])]
    return tuple(level[min(at ^ 1, len(level) - 1)].hex() for level, at in ways)


def top_of(node: bytes, number: int, count: int, path: Sequence[Hash]) -> Hash | None:
    """Return the top of a tree of `count` leaves in which a leaf has this number and this path.

    None if it is no path of such a leaf: it is too long or too short, or says what cannot be.
    """
    for beside in map(bytes.fromhex, path):
        is_alone = number == count - 1 and number % 2 == 0
        if number >= count or count < 2 or (is_alone and beside != node):
            return None
        node = node_hash(beside, node) if number % 2 else node_hash(node, beside)
        number, count = number // 2, -(-count // 2)
    return node.hex() if (number, count) == (0, 1) else None


def first_parting(tree: MerkleTree, ask: Callable[[int, int], bytes]) -> int:
    """Return the first leaf at which another tree, of as many leaves and another top, parts.

    `ask` is its node at a height and place: asked for once at each height, whatever the leaves.
    """
    number = 0
    for height in reversed(range(len(tree) - 1)):
        number *= 2
        number += ask(height, number) == tree[height][number]
    return number
