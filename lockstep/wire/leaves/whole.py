"""Arrays that are sent whole: floats, as gradients or the load of experts; and bytes of codes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from lockstep.optim.optimizer import Tree
from lockstep.wire.leaves.leaf import Leaf, Packing
from lockstep.wire.reader import ByteReader, little
from lockstep.wire.spool import Buffer, drop_pages

DTYPES = [np.dtype(kind) for kind in (np.float32, bfloat16, np.float16, np.uint8)]


class Whole(Leaf):
    """An array of floats that is sent whole, in its own dtype."""

    packings = {"lockstep": Packing(0)}
    word = "array"

    @classmethod
    def holds(cls, node: Any) -> bool:
        return hasattr(node, "dtype") and node.dtype != np.uint8

    @property
    def row(self) -> tuple[int, int, int]:
        return int(np.prod(self.raw.shape)), DTYPES.index(self.raw.dtype), 0

    @property
    def misfit(self) -> str | None:
        if self.raw.dtype in DTYPES:
            return None
        known = ", ".join(dtype.name for dtype in DTYPES)
        return f"an array is {self.raw.dtype}, expected one of {known}: messages hold such arrays"

    def fields(self) -> Iterator[Buffer]:
        yield little(self.raw)
        drop_pages([self.raw])

    def read(self, reader: ByteReader, name: str) -> Tree:
        raw = self.read_raw(reader, int(np.prod(self.raw.shape)), name)
        drop_pages([raw])
        return raw.reshape(self.raw.shape)

    @property
    def raw(self) -> Any:
        return self.node

    def with_raw(self, raw: Any) -> "Whole":
        return type(self)(raw)


class Codes(Whole):
    """Bytes sent whole, numbers of few bits that a quantizer packed; a liar can change each bit."""

    sized = False

    @classmethod
    def holds(cls, node: Any) -> bool:
        return hasattr(node, "dtype") and node.dtype == np.uint8

    @property
    def values(self) -> Any:
        return np.where(np.unpackbits(np.asarray(self.raw)), -1.0, 1.0)

    def with_values(self, values: Any) -> Whole:
        return self.with_raw(np.packbits(values < 0).reshape(self.raw.shape))

    def read_raw(self, reader: ByteReader, count: int, name: str) -> Any:
        return reader.array(np.uint8, count, name)
