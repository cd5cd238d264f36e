"""The kinds of leaves: what a message can hold of one parameter, a class and a file each.

The wire, the bound on values and the lies of a liar ask the class. A new file is found by being
here.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import jax

from lockstep.optim.optimizer import Tree
from lockstep.wire.leaves.leaf import Leaf

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]

KINDS: list[type[Leaf]] = [
    kind
    for file in _FILES
    for kind in vars(file).values()
    if isinstance(kind, type) and issubclass(kind, Leaf) and hasattr(kind, "packings")
    if kind.__module__ == file.__name__
]


def leaf_of(node: Tree, area: int = 0) -> Leaf:
    """Return the leaf that is a node of a message's tree, or of its shapes and dtypes."""
    return next(kind(node, area) for kind in KINDS if kind.holds(node))


def leaves_of(message: Tree) -> list[Leaf]:
    """Return the leaves of a message, in the order of the wire."""
    return [leaf_of(node) for node in jax.tree.leaves(message, is_leaf=_is_leaf)]


def leaves_by(areas: Tree, message: Tree) -> list[Leaf]:
    """Return the leaves of a message whose `areas` are as in `Form`, in the order of the wire."""
    structure: Any = jax.tree.structure(areas)
    return list(map(leaf_of, structure.flatten_up_to(message), jax.tree.leaves(areas)))


def _is_leaf(node: Tree) -> bool:
    return any(kind.holds(node) for kind in KINDS)
