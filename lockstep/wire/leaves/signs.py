"""Signs at chosen positions: one bit each, least significant bit first, 1 for negative."""

from typing import Any

import numpy as np

from lockstep.wire.leaves.chosen import Chosen
from lockstep.wire.leaves.leaf import Leaf, Packing
from lockstep.wire.leaves.rice_coded import RiceCoded
from lockstep.wire.pieces import Field
from lockstep.wire.reader import ByteReader, WireError
from lockstep.wire.spool import Buffer


class Signs(Chosen):
    """Chosen positions, each with its sign."""

    packings = {"lockstep": RiceCoded(1), "psyche": Packing(3)}
    sized, signs = False, True

    @property
    def values(self) -> Any:
        return np.where(self.raw, -1.0, 1.0)

    def with_values(self, values: Any) -> Leaf:
        return self.with_raw(values < 0)

    @property
    def field(self) -> Field:
        return Field(np.dtype(np.uint8), self.bytes_of(self.raw.size), True)

    def bytes_of(self, count: int) -> int:
        return -(-count // 8)

    def to_bytes(self, raw: Any) -> Buffer:
        return np.packbits(np.asarray(raw), axis=None, bitorder="little").tobytes()

    def read_raw(self, reader: ByteReader, count: int, name: str) -> Any:
        packed = reader.array(np.uint8, self.bytes_of(count), name)
        bits = np.unpackbits(packed, bitorder="little")
        if bits[count:].any():
            raise WireError(f"{name}: padding bits are set, expected zeros")
        return bits[:count].astype(bool)

    # ---- What a liar does with it ----

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a coin's signs."""
        return np.where(rng.random(self.raw.shape) < 0.5, -1.0, 1.0)

    def noisy(self, size: float, rng: np.random.Generator) -> Any:
        """Return its signs, of which each flips with probability min(1, size) / 2.

        Size 1 thus leaves nothing of signs, where it leaves half of the power of values.
        """
        flips = rng.random(self.raw.shape) < min(1.0, size) / 2
        return np.where(flips, -self.values, self.values)
