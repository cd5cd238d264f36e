"""Messages as bytes, without loss: what everybody applies is what decoding these bytes gives.

Version 1, all integers little-endian; docs/wire.md has an example byte by byte.

    magic     4 bytes   "LSWP"
    version   u8        1
    kind      u8        0 dense float32; coefficients: 1 with signs, 2 with float32 values
    tensors   u16       number of parameters, in ascending order of their path
    then for each parameter
      dense:         count u32, and count float32
      coefficients:  blocks u32, kept u32, area u32; blocks x kept places, ascending within a
                     block, as u8, u16 or u32 by the area; then the signs, one bit each, least
                     significant bit first, zero-padded to a byte, 1 for negative; or the values
                     as float32

Shapes: N blocks, K coefficients kept of each, A places in a block.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.optim.distro import Coefficients
from pipeline.optim.optimizer import Optimizer, Tree

MAGIC, VERSION = b"LSWP", 1
HEADER = struct.Struct("<4sBBH")
DENSE, SIGNS, VALUES = 0, 1, 2
COUNT, SIZES = struct.Struct("<I"), struct.Struct("<III")


class WireError(ValueError):
    """Bytes that are no message of the expected form; one line, what was found and expected."""


class Form(NamedTuple):
    """The one form in which a run's messages are accepted.

    like: a message's shapes and dtypes: nested dict of Coefficients, or of float32 arrays.
    areas: A of each parameter, which a message alone does not tell; 0 where messages are dense.
    """

    like: Tree
    areas: Tree

    @property
    def kind(self) -> int:
        """DENSE, SIGNS or VALUES: all parameters of a run are sent alike."""
        first = jax.tree.leaves(self.like, is_leaf=_is_sparse)[0]
        if not _is_sparse(first):
            return DENSE
        return SIGNS if first.value_NK.dtype == bool else VALUES


def form_of(optimizer: Optimizer, params: Tree) -> Form:
    """The form of the messages that `optimizer` sends about `params`; computes nothing."""

    def first_message(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        step = jnp.ones((), jnp.int32)
        own = optimizer.inner(params, own, params, step)
        return own, optimizer.send(own, params, shared, step)[0]

    own, like = jax.eval_shape(first_message, params)
    sparse = _is_sparse(jax.tree.leaves(like, is_leaf=_is_sparse)[0])
    widths = jax.tree.map(lambda delta: delta.shape[1], own["delta"]) if sparse else None
    return Form(like, widths if sparse else jax.tree.map(lambda _: 0, like))


def fields(message: Tree) -> Iterator[bytes]:
    """The raw bytes of each parameter, places and then values: what a commitment hashes."""
    for leaf in jax.tree.leaves(message, is_leaf=_is_sparse):
        if _is_sparse(leaf):
            index_NK, value_NK = np.asarray(leaf.index_NK), np.asarray(leaf.value_NK)
            yield index_NK.astype(index_NK.dtype.newbyteorder("<")).tobytes()
            if value_NK.dtype == bool:
                yield np.packbits(value_NK, axis=None, bitorder="little").tobytes()
            else:
                yield value_NK.astype("<f4").tobytes()
        else:
            yield np.asarray(leaf).astype("<f4").tobytes()


def encode(message: Tree, form: Form) -> bytes:
    """A message of this form as bytes."""
    leaves = jax.tree.leaves(message, is_leaf=_is_sparse)
    parts = [HEADER.pack(MAGIC, VERSION, form.kind, len(leaves))]
    raw = fields(message)
    for leaf, area in zip(leaves, jax.tree.leaves(form.areas), strict=True):
        if _is_sparse(leaf):
            parts += [SIZES.pack(*leaf.index_NK.shape, area), next(raw), next(raw)]
        else:
            parts += [COUNT.pack(np.size(leaf)), next(raw)]
    return b"".join(parts)


def decode(data: bytes, form: Form) -> Tree:
    """The message in these bytes, which may come from anyone.

    Raises:
      WireError: they are of another form, too short or too long, name a place that is out of range
        or out of order, or hold a value that is not finite.
    """
    reader = _Reader(data)
    leaves, structure = jax.tree.flatten(form.like, is_leaf=_is_sparse)
    expected = (MAGIC, VERSION, form.kind, len(leaves))
    reader.expect(HEADER, expected, "header (magic, version, kind, tensors)")
    message = []
    for number, (leaf, area) in enumerate(zip(leaves, jax.tree.leaves(form.areas), strict=True)):
        name = f"parameter {number}"
        if not _is_sparse(leaf):
            count = int(np.prod(leaf.shape))
            reader.expect(COUNT, (count,), f"{name} count")
            message.append(_finite(reader.array("<f4", count, name), name).reshape(leaf.shape))
            continue
        blocks, kept = leaf.index_NK.shape
        reader.expect(SIZES, (blocks, kept, area), f"{name} (blocks, kept, area)")
        dtype = np.dtype(leaf.index_NK.dtype).newbyteorder("<")
        index_NK = reader.array(dtype, blocks * kept, name).reshape(blocks, kept)
        _check_places(index_NK, area, name)
        if leaf.value_NK.dtype == bool:
            packed = reader.array(np.uint8, -(-blocks * kept // 8), name)
            bits = np.unpackbits(packed, bitorder="little")
            if bits[blocks * kept :].any():
                raise WireError(f"{name}: padding bits are set, expected zeros")
            value_NK = bits[: blocks * kept].astype(bool).reshape(blocks, kept)
        else:
            value_NK = _finite(reader.array("<f4", blocks * kept, name), name)
            value_NK = value_NK.reshape(blocks, kept)
        message.append(Coefficients(index_NK.astype(dtype.newbyteorder("=")), value_NK))
    if reader.rest:
        raise WireError(f"{reader.rest} bytes after the last parameter, expected none")
    return structure.unflatten(message)


def _is_sparse(node: object) -> bool:
    return isinstance(node, Coefficients)


def _check_places(index_NK: np.ndarray, area: int, name: str) -> None:
    if index_NK.size and int(index_NK.max()) >= area:
        raise WireError(f"{name}: place {int(index_NK.max())}, expected less than {area}")
    if not np.all(index_NK[:, 1:] > index_NK[:, :-1]):
        raise WireError(f"{name}: places of a block are not strictly ascending")


def _finite(values: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(values).all():
        raise WireError(f"{name}: a value is not finite")
    return values.astype(np.float32)


class _Reader:
    """Takes bytes from the front, never past the end."""

    def __init__(self, data: bytes):
        self.data, self.at = memoryview(data), 0

    @property
    def rest(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, name: str) -> memoryview:
        if size > self.rest:
            raise WireError(f"{name}: {self.rest} bytes left, expected {size}")
        self.at += size
        return self.data[self.at - size : self.at]

    def expect(self, form: struct.Struct, values: tuple, name: str) -> None:
        found = form.unpack(self.take(form.size, name))
        if found != values:
            raise WireError(f"{name}: found {found}, expected {values}")

    def array(self, dtype: np.dtype | str | type, count: int, name: str) -> np.ndarray:
        dtype = np.dtype(dtype)
        return np.frombuffer(self.take(count * dtype.itemsize, name), dtype)
