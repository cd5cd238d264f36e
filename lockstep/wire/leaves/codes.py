"""Bytes of codes that are sent whole: numbers of few bits, which a quantizer packed."""

from typing import Any

import numpy as np

from lockstep.wire.leaves.whole import Whole
from lockstep.wire.reader import ByteReader


class Codes(Whole):
    """Codes, of which a liar can change each bit."""

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
