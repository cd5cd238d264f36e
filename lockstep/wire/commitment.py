"""Commitments: the hash of a message that a peer sends, and the hash of a tree of arrays."""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from lockstep.wire.spool import Buffer


def data_hash(step: int, first: int, last: int, fields: Iterable[Buffer]) -> bytes:
    """Return a message's commitment: SHA-256 over Psyche's field order.

    SHA-256(step u32 + first u64 + last u64, all big-endian, + every field's bytes).

    The peer trained on the sequences first to last, inclusive. `fields` are, for each parameter in
    the order of the wire, its index bytes, then its value bytes. Psyche hashes no lengths, so bytes
    could move between neighbouring fields without changing the hash. The wire format rules that
    out: the shapes of the params fix each field's length.
    """
    digest = hashlib.sha256(step.to_bytes(4, "big"))
    digest.update(first.to_bytes(8, "big") + last.to_bytes(8, "big"))
    for field in fields:
        digest.update(field)
    return digest.digest()


def flatten(tree: object) -> dict[str, np.ndarray]:
    """Return the leaves of nested dicts, tuples and named tuples by their path, as in "layers/wq".

    A part of a path is a key, a field's name or a position, whatever the container, so that a
    state has the same paths before and after a checkpoint. None and empty containers have no leaf.

    Raises:
      ValueError: Two leaves would share a path, or a key is empty or contains "/".
    """
    leaves: dict[str, np.ndarray] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        path = "/".join(names)
        if path in leaves or any(not name or "/" in name for name in names):
            raise ValueError(f"ambiguous path {path!r}: keys must be unique, not empty, without /")
        leaves[path] = np.asarray(leaf)
    return leaves


def tree_hash(tree: object) -> str:
    """Return a tree's hash in hex: SHA-256 over the leaves sorted by path.

    For each leaf, its path, dtype, shape and bytes (C order, little-endian), each after its length
    as a little-endian u64, so that no two sets of leaves give the same stream.

    Raises:
      ValueError: A leaf is not an array of numbers, or see `flatten`.
    """
    digest = hashlib.sha256()
    for path, array in sorted(flatten(tree).items()):
        if array.dtype.hasobject or array.dtype.kind in "SUMm":
            raise ValueError(f"{path!r} has dtype {array.dtype}, expected numbers")
        if array.dtype.str.startswith(">"):
            array = array.astype(array.dtype.newbyteorder("<"))
        shape = ",".join(map(str, array.shape))
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # hashed without a copy
        for part in (path.encode(), array.dtype.name.encode(), shape.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
