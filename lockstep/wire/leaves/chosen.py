"""A parameter of which its peer chose some positions of each block: what signs and values share.

Shapes: N blocks of a parameter, K positions kept of each, A positions in a block.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.optim.optimizer import Tree
from lockstep.wire.leaves.leaf import Leaf
from lockstep.wire.pieces import Field
from lockstep.wire.reader import ByteReader, WireError, little
from lockstep.wire.spool import Buffer


class Chosen(Leaf):
    """Positions, ascending in each block, and something at each of them."""

    @classmethod
    def holds(cls, node: Any) -> bool:
        return isinstance(node, Coefficients) and (node.value_NK.dtype == bool) == cls.signs

    @property
    def row(self) -> tuple[int, int, int]:
        blocks, kept = self.node.index_NK.shape
        return blocks, kept, self.area

    @property
    def pieces(self) -> tuple[Field, ...]:
        index = self.node.index_NK
        return Field(np.dtype(index.dtype), index.size * index.dtype.itemsize, True), self.field

    def fields(self) -> Iterator[Buffer]:
        yield little(self.node.index_NK)
        yield self.to_bytes(self.raw)

    def read(self, reader: ByteReader, name: str) -> Tree:
        like = self.node.index_NK
        index_NK = reader.array(like.dtype, like.size, name).reshape(like.shape)
        if not np.all(index_NK[:, 1:] > index_NK[:, :-1]):
            raise WireError(f"{name}: indices of a block are not strictly ascending")
        self.check_last(index_NK, name)
        return self.at(index_NK, self.read_raw(reader, like.size, name))

    def check_last(self, index_NK: Any, name: str) -> None:
        """Indices ascend, so the last of a block is its largest."""
        last = int(index_NK[:, -1].max())
        if last >= self.area:
            raise WireError(f"{name}: index {last}, expected less than {self.area}")

    def at(self, index_NK: Any, raw: Any) -> Coefficients:
        """Return the node of other positions and values, in these shapes."""
        like = self.node.index_NK
        return Coefficients(index_NK.astype(like.dtype, copy=False), raw.reshape(like.shape))

    # ---- Values ----

    @property
    def raw(self) -> Any:
        return self.node.value_NK

    def with_raw(self, raw: Any) -> "Chosen":
        return type(self)(self.node._replace(value_NK=raw), self.area)

    # ---- What a liar does with it ----

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.node.index_NK), self.area

    @property
    def kept(self) -> int:
        return int(self.node.index_NK.shape[1])

    @property
    def _index(self) -> Any:
        return np.asarray(self.node.index_NK).astype(np.int64)

    def put(self, values: Any) -> Any:
        whole_NA = np.zeros(self.shape)
        np.put_along_axis(whole_NA, self._index, values, axis=1)
        return whole_NA

    def take(self, whole: Any) -> Any:
        return np.take_along_axis(whole, self._index, axis=1)

    def moved(self, order: Any) -> "Chosen":
        index_NK = np.sort(np.argsort(order, axis=1, kind="stable")[:, : self.kept], axis=1)
        return type(self)(self.at(index_NK, self.raw), self.area)

    def repeated(self, block: int) -> "Chosen":
        index_NK = np.array(self.node.index_NK)
        index_NK[block, 1] = index_NK[block, 0]
        return type(self)(self.at(index_NK, self.raw), self.area)
