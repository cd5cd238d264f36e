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

What each holds is a class in `leaves`.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.wire.leaves import leaves_by, leaves_of
from lockstep.wire.leaves.leaf import Leaf, Packing
from lockstep.wire.leaves.whole import Whole
from lockstep.wire.reader import ByteReader
from lockstep.wire.reader import NotFiniteValueError as NotFiniteValueError
from lockstep.wire.reader import WireError as WireError
from lockstep.wire.spool import Buffer

MAGIC, VERSION = b"LSWP", 2
HEADER = struct.Struct("<4sBBH8s")
KEPT_BYTES = 0.5  # a transcript keeps messages of at most this many bytes per param
SHARE = 10  # a tenth of a memory is for messages: while they are merged they take about half of it


@dataclass(frozen=True)
class Form:
    """The only form in which a run's messages are accepted.

    A receiver knows every length from the run, and so never believes one that a message states.
    """

    #: A message's shapes and dtypes: a tree of the nodes that `leaves` knows.
    like: Tree
    #: A of each parameter, which does not follow from a message; 0 for an array sent whole.
    areas: Tree
    layout: str  #: "lockstep", or "psyche" with each parameter by itself.
    size: int  #: Number of params, which does not follow from a message either.

    @cached_property
    def leaves(self) -> list[Leaf]:
        """Shapes and dtypes of a message by parameter, in the order of the wire."""
        return leaves_by(self.areas, self.like)

    @cached_property
    def arrays(self) -> list[Leaf]:
        """Those of a message's arrays that are sent whole, which come first."""
        return [leaf for leaf in self.leaves if not leaf.area]

    @cached_property
    def packed(self) -> list[Leaf]:
        """Those of a message's other parameters, which a run sends alike."""
        return [leaf for leaf in self.leaves if leaf.area]

    @cached_property
    def packing(self) -> Packing:
        """How a message's parameters travel after the arrays that are sent whole."""
        kind = type(self.packed[0]) if self.packed else Whole
        return kind.packings[self.layout]

    @cached_property
    def kept(self) -> bool:
        """Whether a transcript keeps messages; of larger ones, such as gradients, it keeps hashes.

        It goes by the size in memory, which the bytes on the wire do not exceed: that is known
        before the first message.
        """
        size: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.like))
        return size <= KEPT_BYTES * self.size

    def large(self, peers: int, memory: int) -> bool:
        """Return whether the messages of so many peers are too large for a memory of these bytes.

        Only whole arrays are (gradients, pseudogradients); messages of indices are small.
        """
        return not self.packed and SHARE * peers * self.bytes_about > memory

    @cached_property
    def bytes_about(self) -> int:
        """Length of a message; with Rice-coded positions, that for evenly drawn ones."""
        return round(self._sizes[0])

    @cached_property
    def bytes_most(self) -> int:
        """Maximum length of a message: only Rice-coded positions make it vary."""
        return int(self._sizes[1])

    @cached_property
    def _sizes(self) -> tuple[float, ...]:
        arrays = ARRAYS.sizes(self.arrays)
        packed = self.packing.sizes(self.packed) if self.packed else (0, 0)
        return tuple(HEADER.size + x + y for x, y in zip(arrays, packed, strict=True))

    @cached_property
    def header(self) -> bytes:
        """The first bytes of every message of this form."""
        rows = b"".join(struct.pack("<III", *leaf.row) for leaf in self.leaves)
        digest = hashlib.sha256(rows).digest()
        return HEADER.pack(MAGIC, VERSION, self.packing.number, len(self.leaves), digest[:8])


ARRAYS = Whole.packings["lockstep"]  # how arrays that are sent whole travel, in every layout


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
    if not form.packed and layout not in Whole.packings:
        raise LockstepError(
            f'[peers] wire = "{layout}", expected "lockstep" with a dense optimizer: Psyche '
            "sends no gradients"
        )
    for misfit in filter(None, (leaf.misfit for leaf in form.leaves)):
        raise LockstepError(misfit)
    return form


def fields(message: Tree) -> Iterator[Buffer]:
    """Yield a message's raw bytes by parameter, indices, then values: what a commitment hashes."""
    for leaf in leaves_of(message):
        yield from leaf.fields()


def encode(message: Tree, form: Form) -> Buffer:
    """Return a message of this form as bytes."""
    leaves = leaves_by(form.areas, message)
    arrays = ARRAYS.encode([leaf for leaf in leaves if not leaf.area])
    packed = form.packing.encode([leaf for leaf in leaves if leaf.area]) if form.packed else []
    return b"".join([form.header, *arrays, *packed])


def saved(message: Tree, form: Form) -> jax.Array | int:
    """Return by how many bytes a message is shorter than `form.bytes_most`, without encoding it.

    It may be jitted, so that a message whose bytes nobody reads stays on its device.
    """
    packed = [leaf for leaf in leaves_by(form.areas, message) if leaf.area]
    return form.packing.saved(packed) if packed else 0


def decode(data: Buffer, form: Form) -> Tree:
    """Return the message in a stranger's bytes; its arrays are read-only.

    Raises:
      WireError: The bytes are of another form, too short or too long, have an index out of range or
        out of order or a value that is not finite, or are not what `encode` would give.
    """
    reader = ByteReader(data)
    header = bytes(reader.take(HEADER.size, "header"))
    if header != form.header:
        actual, expected = HEADER.unpack(header), HEADER.unpack(form.header)
        text = "header (magic, version, kind, tensors, form): found "
        raise WireError(f"{text}{actual}, expected {expected}")
    check_length(len(reader.data), form)
    # What is read, and how much of it, follows from the form, never from the bytes themselves.
    arrays = iter(ARRAYS.decode(reader, form.arrays))
    packed = iter(form.packing.decode(reader, form.packed) if form.packed else ())
    if reader.remaining:
        raise WireError(f"{reader.remaining} bytes after the last parameter, expected the end")
    nodes = [next(packed if leaf.area else arrays) for leaf in form.leaves]
    return jax.tree.unflatten(jax.tree.structure(form.areas), nodes)


def check_length(size: int, form: Form) -> None:
    """Check that a message is not too long: decoded, it takes many times its bytes.

    Raises:
      WireError: No message of this form has so many bytes.
    """
    if size > form.bytes_most:
        raise WireError(f"{size} bytes, expected at most {form.bytes_most}")
