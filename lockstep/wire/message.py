"""Lossless wire format of messages: every peer applies what decoding these bytes gives.

Version 2, all integers little-endian; docs/reference/wire.md has an example byte by byte.

    magic     4 bytes   "LSWP"
    version   u8        2
    kind      u8        0 arrays sent whole; indices and signs, 1 Rice-coded, 3 plain; indices and
                        bfloat16 values, 2 Rice-coded, 4 plain
    tensors   u16       number of arrays and of parameters sent by indices, in ascending order of
                        their path
    form      8 bytes   first bytes of the shapes' SHA-256: another run's message is refused
    then
      0 to 4    arrays sent whole (gradients or their codes; beside indices, the load of experts or
                flags of blocks), each in its own dtype; then
      3, 4      each parameter's indices, ascending within a block, as u8, u16 or u32 by the block's
                area, and its signs, or its values: what a commitment hashes, and Psyche's fields
      1, 2      u8 for each parameter, its Rice parameter; all low bits; all signs, or all values;
                all high parts (rice.py)

Signs are one bit each, least significant bit first, zero-padded to a byte, 1 for negative.
Shapes: N blocks, K coefficients kept of each, A positions in a block.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_dtypes import bfloat16

from lockstep.errors import LockstepError
from lockstep.optim.compressed.compressor import Coefficients
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.wire import rice
from lockstep.wire.pieces import Field, Pieces
from lockstep.wire.spool import Buffer, drop_pages

MAGIC, VERSION = b"LSWP", 2
HEADER = struct.Struct("<4sBBH8s")
DENSE, CODED_SIGNS, CODED_VALUES, PLAIN_SIGNS, PLAIN_VALUES = range(5)
DTYPES = [np.dtype(kind) for kind in (np.float32, bfloat16, np.float16, np.uint8)]  # sent whole
KEPT_BYTES = 0.5  # a transcript keeps messages of at most this many bytes per param
LARGE_BYTES = 2**28  # a dense message of this many bytes waits on disk for the round's decision
PLAIN = "psyche"  # the layout of kinds 3 and 4; "lockstep" is Rice-coded


class WireError(ValueError):
    """Bytes are not a message of the expected form; one line, with both values."""


class NotFiniteValueError(WireError):
    """Bytes are a message with an infinity or a NaN in it."""


@dataclass(frozen=True)
class Form:
    """The only form in which a run's messages are accepted.

    A receiver knows every length from the run, and so never believes one that a message states.
    """

    #: A message's shapes and dtypes: a tree of Coefficients, of arrays of `DTYPES`, or both.
    like: Tree
    #: A of each parameter, which does not follow from a message; 0 for an array sent whole.
    areas: Tree
    layout: str  #: "lockstep" or "psyche".
    size: int  #: Number of params, which does not follow from a message either.

    @cached_property
    def leaves(self) -> list[Any]:
        """Shapes and dtypes by parameter, in the order of the wire."""
        return jax.tree.leaves(self.like, is_leaf=_is_sparse)

    @cached_property
    def sparse(self) -> list[tuple[Coefficients, int]]:
        """Parameters sent by indices: shapes and dtypes, and the area of their blocks."""
        rows = zip(self.leaves, jax.tree.leaves(self.areas), strict=True)
        return [(leaf, area) for leaf, area in rows if _is_sparse(leaf)]

    @cached_property
    def kind(self) -> int:
        """The wire's kind: a run sends all parameters alike, besides arrays sent whole."""
        if not self.sparse:
            return DENSE
        signs = self.sparse[0][0].value_NK.dtype == bool
        if self.layout == PLAIN:
            return PLAIN_SIGNS if signs else PLAIN_VALUES
        return CODED_SIGNS if signs else CODED_VALUES

    @cached_property
    def kept(self) -> bool:
        """Whether a transcript keeps messages; of larger ones, such as gradients, it keeps hashes.

        It goes by the size in memory, which the bytes on the wire do not exceed: that is known
        before the first message.
        """
        size: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.like))
        return size <= KEPT_BYTES * self.size

    @cached_property
    def pieces(self) -> Pieces:
        """How messages are cut into pieces, by the fields that `fields` yields."""
        parts = []
        for leaf in self.leaves:
            if _is_sparse(leaf):
                index, value = leaf.index_NK, leaf.value_NK
                parts.append(Field(np.dtype(index.dtype), index.size * index.dtype.itemsize, True))
                signs = value.dtype == bool
                size = -(-value.size // 8) if signs else value.size * value.dtype.itemsize
                parts.append(Field(np.dtype(np.uint8 if signs else value.dtype), size, True))
            else:
                size = leaf.size * leaf.dtype.itemsize
                parts.append(Field(np.dtype(leaf.dtype), size, False))
        return Pieces(tuple(parts))

    @property
    def large(self) -> bool:
        """Whether the messages of all peers are too large for memory, and are merged in parts.

        Only whole arrays are (gradients, pseudogradients); messages of indices are small.
        """
        return self.kind == DENSE and self.bytes_about >= LARGE_BYTES

    @cached_property
    def bytes_about(self) -> int:
        """Length of a message; with Rice-coded positions, that for evenly drawn ones."""
        total = float(HEADER.size)
        for leaf, area in zip(self.leaves, jax.tree.leaves(self.areas), strict=True):
            if not _is_sparse(leaf):
                total += leaf.size * leaf.dtype.itemsize
                continue
            blocks, k = leaf.index_NK.shape
            signs = leaf.value_NK.dtype == bool
            total += -(-blocks * k // 8) if signs else 2 * blocks * k
            if self.layout == PLAIN:
                total += blocks * k * leaf.index_NK.dtype.itemsize
            else:
                total += blocks * (math.log2(math.comb(area, k)) / 8) + 1
        return round(total)

    @cached_property
    def bytes_most(self) -> int:
        """Maximum length of a message: only Rice-coded positions make it vary."""
        if self.kind not in (CODED_SIGNS, CODED_VALUES):
            return self.bytes_about
        arrays = [leaf for leaf in self.leaves if not _is_sparse(leaf)]
        size: int = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
        rows = [(leaf.index_NK.shape, area) for leaf, area in self.sparse]
        shapes = [(blocks, k, area) for (blocks, k), area in rows]
        count = sum(blocks * k for blocks, k, _ in shapes)
        values = -(-count // 8) if self.kind == CODED_SIGNS else 2 * count
        return HEADER.size + size + len(shapes) + values + rice.bytes_most(shapes)

    @cached_property
    def header(self) -> bytes:
        """The first bytes of every message of this form."""
        rows = [
            (*leaf.index_NK.shape, area)
            if _is_sparse(leaf)
            else (int(np.prod(leaf.shape)), DTYPES.index(leaf.dtype), 0)
            for leaf, area in zip(self.leaves, jax.tree.leaves(self.areas), strict=True)
        ]
        digest = hashlib.sha256(b"".join(struct.pack("<III", *row) for row in rows)).digest()
        return HEADER.pack(MAGIC, VERSION, self.kind, len(rows), digest[:8])


def form_of(optimizer: Optimizer, params: Tree, layout: str) -> Form:
    """Return the form of an optimizer's messages for params, or their shapes, without an array.

    Raises:
      LockstepError: The wire has no such messages.
    """

    def first_message(params: Tree) -> Tree:
        own, shared = optimizer.init(params)
        step = jnp.ones((), jnp.int32)
        own = optimizer.accumulate(params, own, params, step)
        return optimizer.send(own, params, shared, step)[0]

    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    form = Form(jax.eval_shape(first_message, params), optimizer.areas(params), layout, size)
    if layout == PLAIN and form.kind == DENSE:
        raise LockstepError(
            f'[peers] wire = "{PLAIN}", expected "lockstep" with a dense optimizer: Psyche '
            "sends no gradients"
        )
    for leaf, _ in form.sparse:
        if leaf.value_NK.dtype not in (bool, bfloat16):
            found = f"value_dtype is {leaf.value_NK.dtype}"
            raise LockstepError(f"{found}, expected bfloat16: messages hold such values, or signs")
    return form


def fields(message: Tree) -> Iterator[Buffer]:
    """Yield the raw bytes of each parameter, indices and then values: what a commitment hashes."""
    for leaf in jax.tree.leaves(message, is_leaf=_is_sparse):
        if _is_sparse(leaf):
            yield _little(leaf.index_NK)
            yield _packed(leaf.value_NK) if leaf.value_NK.dtype == bool else _little(leaf.value_NK)
        else:
            yield _little(leaf)
            drop_pages([leaf])


def encode(message: Tree, form: Form) -> Buffer:
    """Return a message of this form as bytes."""
    leaves = jax.tree.leaves(message, is_leaf=_is_sparse)
    sparse = [leaf for leaf in leaves if _is_sparse(leaf)]
    arrays = [_little(leaf) for leaf in leaves if not _is_sparse(leaf)]
    coded = form.kind in (CODED_SIGNS, CODED_VALUES)
    return b"".join([form.header, *arrays, *(_code(sparse) if coded else fields(sparse))])


def _code(leaves: list[Coefficients]) -> list[Buffer]:
    gap_M = np.concatenate([rice.gaps(np.asarray(leaf.index_NK)) for leaf in leaves])
    counts = [np.size(leaf.index_NK) for leaf in leaves]
    chosen = rice.parameters(gap_M, counts)
    r_M = np.repeat(chosen, counts)
    values = np.concatenate([np.asarray(leaf.value_NK).ravel() for leaf in leaves])
    return [
        bytes(chosen.tolist()),
        *(rice.pack_low(gap_M[r_M == r], r) for r in sorted(set(chosen.tolist()))),
        _packed(values) if values.dtype == bool else _little(values),
        rice.pack_high(gap_M >> r_M),
    ]


def decode(data: Buffer, form: Form) -> Tree:
    """Return the message in a stranger's bytes; its arrays are read-only.

    Raises:
      WireError: The bytes are of another form, too short or too long, have an index out of range or
        out of order or a value that is not finite, or are not what `encode` would give.
    """
    reader = _Reader(data)
    header = bytes(reader.take(HEADER.size, "header"))
    if header != form.header:
        actual, expected = HEADER.unpack(header), HEADER.unpack(form.header)
        text = "header (magic, version, kind, tensors, form): found "
        raise WireError(f"{text}{actual}, expected {expected}")
    check_length(len(reader.data), form)
    # What is read, and how much of it, follows from the form, never from the bytes themselves.
    arrays = iter(_arrays(reader, form))
    read = _coded if form.kind in (CODED_SIGNS, CODED_VALUES) else _plain
    sparse = iter(read(reader, form) if form.sparse else ())
    if reader.remaining:
        raise WireError(f"{reader.remaining} bytes after the last parameter, expected the end")
    leaves: list[Any] = [next(sparse if _is_sparse(leaf) else arrays) for leaf in form.leaves]
    return jax.tree.unflatten(jax.tree.structure(form.areas), leaves)


def check_length(size: int, form: Form) -> None:
    """Check that a message is not too long: decoded, it takes many times its bytes.

    Raises:
      WireError: No message of this form has so many bytes.
    """
    if size > form.bytes_most:
        raise WireError(f"{size} bytes, expected at most {form.bytes_most}")


# ---- Kinds ----


def _arrays(reader: "_Reader", form: Form) -> list[np.ndarray]:
    arrays = []
    for number, leaf in enumerate(leaf for leaf in form.leaves if not _is_sparse(leaf)):
        name = f"array {number}"
        values = reader.array(leaf.dtype, int(np.prod(leaf.shape)), name)
        if leaf.dtype != np.uint8:
            _finite(values, name)
        drop_pages([values])
        arrays.append(values.reshape(leaf.shape))
    return arrays


def _plain(reader: "_Reader", form: Form) -> list[Coefficients]:
    coefficients = []
    for number, (leaf, area) in enumerate(form.sparse):
        name, shape = f"parameter {number}", leaf.index_NK.shape
        index_NK: Any = reader.array(leaf.index_NK.dtype, shape[0] * shape[1], name).reshape(shape)
        if not np.all(index_NK[:, 1:] > index_NK[:, :-1]):
            raise WireError(f"{name}: indices of a block are not strictly ascending")
        _check_last(index_NK, area, name)
        value_NK: Any = _values(reader, form, shape[0] * shape[1], name).reshape(shape)
        coefficients.append(Coefficients(index_NK, value_NK))
    return coefficients


def _coded(reader: "_Reader", form: Form) -> list[Coefficients]:
    leaves, areas = zip(*form.sparse, strict=True)
    counts = [leaf.index_NK.size for leaf in leaves]
    chosen = reader.array(np.uint8, len(leaves), "Rice parameters").astype(np.int64)
    if np.any(chosen > [int(area).bit_length() for area in areas]):
        raise WireError(f"Rice parameters {chosen.tolist()}, expected at most the bits of an index")
    r_M = np.repeat(chosen, counts)
    low_M = np.zeros(sum(counts), np.int64)
    for r in sorted(set(chosen.tolist())):
        coded_M = r_M == r
        count, name = int(coded_M.sum()), f"low bits of Rice parameter {r}"
        planes = reader.array(np.uint8, rice.low_bytes(count, r), name)
        low_M[coded_M] = _checked(rice.unpack_low, name, planes, count, r)
    values: Any = _values(reader, form, sum(counts), "values")
    high = reader.array(np.uint8, reader.remaining, "high parts")
    gap_M = _checked(rice.unpack_high, "high parts", high, sum(counts)) << r_M | low_M
    # Only the parameters that an encoder chooses: a message has exactly one encoding, so that two
    # different byte strings never carry the same commitment.
    if np.any(chosen != rice.parameters(gap_M, counts)):
        expected = rice.parameters(gap_M, counts).tolist()
        raise WireError(f"Rice parameters {chosen.tolist()}, expected {expected}")

    coefficients, ends = [], np.cumsum(counts)[:-1]
    columns: tuple[Any, ...] = leaves, areas, np.split(gap_M, ends), np.split(values, ends)
    for number, (leaf, area, gap, value) in enumerate(zip(*columns, strict=True)):
        index_NK: Any = rice.indices(gap, leaf.index_NK.shape[1])
        _check_last(index_NK, area, f"parameter {number}")
        index_NK = index_NK.astype(leaf.index_NK.dtype)
        coefficients.append(Coefficients(index_NK, value.reshape(index_NK.shape)))
    return coefficients


# ---- Parts ----


def _is_sparse(node: object) -> bool:
    return isinstance(node, Coefficients)


def _little(array: np.ndarray) -> Buffer:
    """Return an array's bytes, which are not copied where they lie in this order already."""
    array = np.asarray(array)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return array.reshape(-1).view(np.uint8).data


def _packed(signs: np.ndarray) -> bytes:
    return np.packbits(np.asarray(signs), axis=None, bitorder="little").tobytes()


def _values(reader: "_Reader", form: Form, count: int, name: str) -> np.ndarray:
    if form.kind in (CODED_VALUES, PLAIN_VALUES):
        return _finite(reader.array(bfloat16, count, name), name)
    bits = np.unpackbits(reader.array(np.uint8, -(-count // 8), name), bitorder="little")
    if bits[count:].any():
        raise WireError(f"{name}: padding bits are set, expected zeros")
    return bits[:count].astype(bool)


def _check_last(index_NK: np.ndarray, area: int, name: str) -> None:
    """Indices ascend, so the last of a block is its largest."""
    last = int(index_NK[:, -1].max())
    if last >= area:
        raise WireError(f"{name}: index {last}, expected less than {area}")


def _finite(values: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN; we refuse it
        finite = np.isfinite(values).all()
    if not finite:
        raise NotFiniteValueError(f"{name}: a value is not finite")
    return values


def _checked(unpack: Callable[..., np.ndarray], name: str, *arguments: Any) -> np.ndarray:
    try:
        return unpack(*arguments)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error


class _Reader:
    """Takes bytes from the front, never beyond the end."""

    def __init__(self, data: Buffer):
        self.data, self.at = memoryview(data), 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, name: str) -> memoryview:
        if size > self.remaining:
            raise WireError(f"{name}: {self.remaining} bytes left, expected {size}")
        self.at += size
        return self.data[self.at - size : self.at]

    def array(self, dtype: np.dtype | type, count: int, name: str) -> np.ndarray:
        """Take `count` little-endian numbers, in this machine's byte order."""
        dtype = np.dtype(dtype)
        values = np.frombuffer(self.take(count * dtype.itemsize, name), dtype.newbyteorder("<"))
        return values.astype(dtype, copy=False)
