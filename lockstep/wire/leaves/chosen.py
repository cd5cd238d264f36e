"""Parameters of which each peer chose positions, with values or signs at them; Rice-coded or plain.

Shapes: N blocks of a parameter, K positions kept of each, A positions in a block; M gaps of a whole
message, parameter after parameter.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_dtypes import bfloat16

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.optim.optimizer import Tree
from lockstep.wire import rice
from lockstep.wire.leaves.leaf import Leaf, Packing
from lockstep.wire.reader import ByteReader, WireError, little
from lockstep.wire.spool import Buffer


class RiceCoded(Packing):
    """Packs chosen positions of all parameters together, in nearly as few bits as possible."""

    def encode(self, leaves: Sequence[Any]) -> list[Buffer]:
        gap_M = np.concatenate([rice.gaps(np.asarray(leaf.node.index_NK)) for leaf in leaves])
        counts = [leaf.node.index_NK.size for leaf in leaves]
        chosen = rice.parameters(gap_M, counts)
        gaps = list(zip(chosen, np.split(gap_M, np.cumsum(counts)[:-1]), strict=True))
        raw = np.concatenate([np.asarray(leaf.raw).ravel() for leaf in leaves])
        return [
            bytes(chosen),
            *(
                rice.pack_low([gap for r, gap in gaps if r == own], own)
                for own in sorted({*chosen})
            ),
            leaves[0].to_bytes(raw),
            rice.pack_high(rice.high_parts(gap_M, counts, chosen)),
        ]

    def decode(self, reader: ByteReader, forms: Sequence[Any]) -> list[Tree]:
        counts = [form.node.index_NK.size for form in forms]
        chosen = reader.array(np.uint8, len(forms), "Rice parameters").tolist()
        if any(r > form.area.bit_length() for r, form in zip(chosen, forms, strict=True)):
            text = "expected at most the bits of an index"
            raise WireError(f"Rice parameters {chosen}, {text}")
        low: dict[int, np.ndarray] = {}
        for r in sorted({*chosen}):
            count = sum(n for n, own in zip(counts, chosen, strict=True) if own == r)
            name = f"low bits of Rice parameter {r}"
            planes = reader.array(np.uint8, rice.low_bytes(count, r), name)
            low[r] = rice.unpack_low(planes, count, r, name)
        raw_M = forms[0].read_raw(reader, sum(counts), "values")
        high = reader.array(np.uint8, reader.remaining, "high parts")
        high_M = rice.unpack_high(high, sum(counts))
        nodes = []
        for number, (form, r, n) in enumerate(zip(forms, chosen, counts, strict=True)):
            index_NK = rice.indices(high_M[:n] << r | low[r][:n], form.kept)
            form.check_last(index_NK, f"parameter {number}")
            nodes.append(form.at(index_NK, raw_M[:n]))
            high_M, low[r], raw_M = high_M[n:], low[r][n:], raw_M[n:]
        # Only the parameters that an encoder chooses: a message has exactly one encoding, so that
        # two different byte strings never carry the same commitment.
        gap_M = np.concatenate([rice.gaps(node.index_NK) for node in nodes])
        if chosen != (expected := rice.parameters(gap_M, counts)):
            raise WireError(f"Rice parameters {chosen}, expected {expected}")
        return nodes

    def sizes(self, forms: Sequence[Any]) -> tuple[float, int]:
        """Return how many bytes evenly drawn chosen positions take, and any at most."""
        rows, fixed = [form.row for form in forms], len(forms)
        bits = sum(blocks * math.log2(math.comb(area, kept)) for blocks, kept, area in rows)
        about = bits / 8 + sum(form.bytes_of(form.raw.size) for form in forms)
        most = rice.bytes_most(rows) + forms[0].bytes_of(sum(form.raw.size for form in forms))
        return fixed + about, fixed + most

    def saved(self, leaves: Sequence[Any]) -> jax.Array | int:
        indices, areas = [leaf.node.index_NK for leaf in leaves], [leaf.area for leaf in leaves]
        return rice.bytes_most([leaf.row for leaf in leaves]) - rice.bytes_of(indices, areas)


class Values(Leaf):
    """Chosen positions, ascending in each block, with a value at each, rounded to bfloat16."""

    packings = {"lockstep": RiceCoded(2), "psyche": Packing(4)}

    @classmethod
    def holds(cls, node: Any) -> bool:
        return isinstance(node, Coefficients) and (node.value_NK.dtype == bool) == cls.signs

    @property
    def row(self) -> tuple[int, int, int]:
        blocks, kept = self.node.index_NK.shape
        return blocks, kept, self.area

    @property
    def misfit(self) -> str | None:
        if self.signs or self.raw.dtype == bfloat16:
            return None
        found = f"value_dtype is {self.raw.dtype}"
        return f"{found}, expected bfloat16: messages hold such values, or signs"

    @property
    def length(self) -> int:
        index = self.node.index_NK
        return int(index.size * index.dtype.itemsize) + super().length

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
        """Check chosen positions: they ascend, so the last of a block is its largest."""
        last = int(index_NK[:, -1].max())
        if last >= self.area:
            raise WireError(f"{name}: index {last}, expected less than {self.area}")

    def at(self, index_NK: Any, raw: Any) -> Coefficients:
        """Return the node of other chosen positions and values, in these shapes."""
        like = self.node.index_NK
        return Coefficients(index_NK.astype(like.dtype, copy=False), raw.reshape(like.shape))

    @property
    def raw(self) -> Any:
        return self.node.value_NK

    def with_raw(self, raw: Any) -> "Values":
        return type(self)(self.node._replace(value_NK=raw), self.area)

    # ---- What a liar does with it ----

    @property
    def kept(self) -> int:
        return int(self.node.index_NK.shape[1])

    def put(self, values: Any) -> Any:
        whole_NA = np.zeros((len(values), self.area))
        np.put_along_axis(whole_NA, np.asarray(self.node.index_NK, np.int64), values, axis=1)
        return whole_NA

    def take(self, whole: Any) -> Any:
        return np.take_along_axis(whole, np.asarray(self.node.index_NK, np.int64), axis=1)

    def moved(self, order: Any) -> "Values":
        index_NK = np.sort(np.argsort(order, axis=1, kind="stable")[:, : self.kept], axis=1)
        return type(self)(self.at(index_NK, self.raw), self.area)


class Signs(Values):
    """Chosen positions with a bit at each, least significant bit first: 1 for negative."""

    packings = {"lockstep": RiceCoded(1), "psyche": Packing(3)}
    sized, signs = False, True

    @property
    def values(self) -> Any:
        return np.where(self.raw, -1.0, 1.0)

    def with_values(self, values: Any) -> Values:
        return self.with_raw(values < 0)

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
