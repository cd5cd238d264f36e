"""A message cut into pieces: of a message that it does not keep, a transcript keeps a few.

A piece is a range of bytes of one of the message's fields, in the order of the wire. A field is an
array sent whole, or the indices, signs or values of a parameter sent by indices.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lockstep.wire.spool import Buffer

SMALLEST, MOST = 1024, 2**16  # bytes of a piece; pieces of a message, about
SHARE = 0.01  # share of a message's bytes that its sketch may take; at least one piece
HASH = 32  # bytes
MOST_DRAWN = 256  # so many pieces miss a lie in 2 % of a message once in 176 times


class Field(NamedTuple):
    """A field of a message."""

    dtype: np.dtype  # dtype of its elements
    bytes: int  # size of all its elements


@dataclass(frozen=True)
class Pieces:
    """The pieces of messages with these fields."""

    fields: tuple[Field, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of each piece except a field's last: `SMALLEST` times a power of two."""
        size = SMALLEST
        while sum(-(-field.bytes // size) for field in self.fields) > MOST + len(self.fields):
            size *= 2
        return size

    @cached_property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Each piece's field, and where in the field's bytes it begins and ends."""
        return [
            (number, begin, min(begin + self.size, field.bytes))
            for number, field in enumerate(self.fields)
            for begin in range(0, field.bytes, self.size)
        ]

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.ranges)

    @property
    def path(self) -> int:
        """Bytes of a piece's path to the Merkle root over all pieces."""
        return HASH * (self.count - 1).bit_length()

    @cached_property
    def drawn(self) -> int:
        """How many pieces of a message are kept."""
        share = int(SHARE * sum(field.bytes for field in self.fields) // (self.size + self.path))
        return max(1, min(share, MOST_DRAWN, self.count))

    @property
    def shown(self) -> int:
        """Bytes of the largest sketch, in which all pieces are whole."""
        return self.drawn * (self.size + self.path)

    def cut(self, fields: Iterable[Buffer]) -> Iterator[memoryview]:
        """Yield the pieces of a message's fields; the fields may be made one at a time."""
        for field, data in zip(self.fields, fields, strict=True):
            view = memoryview(data)
            for begin in range(0, field.bytes, self.size):
                yield view[begin : min(begin + self.size, field.bytes)]

    def chosen(self, fields: Iterable[Buffer], drawn: Sequence[int]) -> bytes:
        """Return the drawn pieces of a message's fields, one after the other."""
        chosen = set(drawn)
        return b"".join(bytes(p) for n, p in enumerate(self.cut(fields)) if n in chosen)

    def split(self, data: bytes, drawn: Sequence[int]) -> dict[int, bytes]:
        """Return the pieces that `chosen` has joined, by their number."""
        by_number, at = {}, 0
        for n in drawn:
            _, begin, end = self.ranges[n]
            by_number[n], at = data[at : at + end - begin], at + end - begin
        return by_number
