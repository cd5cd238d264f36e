"""Chosen positions in nearly as few bits as possible: how those of a whole message are packed.

Shapes: N blocks of a parameter, K positions kept of each, A positions in a block; M gaps of a whole
message, parameter after parameter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.wire import rice
from lockstep.wire.leaves.chosen import Chosen
from lockstep.wire.leaves.leaf import Packing
from lockstep.wire.reader import ByteReader, WireError
from lockstep.wire.spool import Buffer


class RiceCoded(Packing):
    """Packs the positions of all parameters together, as Rice-coded gaps."""

    def encode(self, leaves: Sequence[Chosen]) -> list[Buffer]:
        gap_M = np.concatenate([rice.gaps(np.asarray(leaf.node.index_NK)) for leaf in leaves])
        counts = [np.size(leaf.node.index_NK) for leaf in leaves]
        chosen = rice.parameters(gap_M, counts)
        r_M = np.repeat(chosen, counts)
        raw = np.concatenate([np.asarray(leaf.raw).ravel() for leaf in leaves])
        return [
            bytes(chosen.tolist()),
            *(rice.pack_low(gap_M[r_M == r], r) for r in sorted(set(chosen.tolist()))),
            leaves[0].to_bytes(raw),
            rice.pack_high(gap_M >> r_M),
        ]

    def decode(self, reader: ByteReader, forms: Sequence[Chosen]) -> list[Tree]:
        counts = [form.node.index_NK.size for form in forms]
        chosen = reader.array(np.uint8, len(forms), "Rice parameters").astype(np.int64)
        if np.any(chosen > [form.area.bit_length() for form in forms]):
            text = "expected at most the bits of an index"
            raise WireError(f"Rice parameters {chosen.tolist()}, {text}")
        r_M = np.repeat(chosen, counts)
        low_M = np.zeros(sum(counts), np.int64)
        for r in sorted(set(chosen.tolist())):
            coded_M = r_M == r
            count, name = int(coded_M.sum()), f"low bits of Rice parameter {r}"
            planes = reader.array(np.uint8, rice.low_bytes(count, r), name)
            low_M[coded_M] = _checked(rice.unpack_low, name, planes, count, r)
        raw_M = forms[0].read_raw(reader, sum(counts), "values")
        high = reader.array(np.uint8, reader.remaining, "high parts")
        gap_M = _checked(rice.unpack_high, "high parts", high, sum(counts)) << r_M | low_M
        # Only the parameters that an encoder chooses: a message has exactly one encoding, so that
        # two different byte strings never carry the same commitment.
        if np.any(chosen != rice.parameters(gap_M, counts)):
            expected = rice.parameters(gap_M, counts).tolist()
            raise WireError(f"Rice parameters {chosen.tolist()}, expected {expected}")
        nodes, ends = [], np.cumsum(counts)[:-1]
        of_each = zip(forms, np.split(gap_M, ends), np.split(raw_M, ends), strict=True)
        for number, (form, gap, raw) in enumerate(of_each):
            index_NK = rice.indices(gap, form.kept)
            form.check_last(index_NK, f"parameter {number}")
            nodes.append(form.at(index_NK, raw))
        return nodes

    def bytes_about(self, forms: Sequence[Chosen]) -> float:
        """Return how many bytes evenly drawn positions take."""
        rows = [form.row for form in forms]
        bits = sum(blocks * math.log2(math.comb(area, kept)) for blocks, kept, area in rows)
        return bits / 8 + len(forms) + sum(form.field.bytes for form in forms)

    def bytes_most(self, forms: Sequence[Chosen]) -> int:
        count = sum(form.node.index_NK.size for form in forms)
        gaps = rice.bytes_most([form.row for form in forms])
        return len(forms) + forms[0].bytes_of(count) + gaps


def _checked(unpack: Callable[..., Any], name: str, *arguments: Any) -> Any:
    try:
        return unpack(*arguments)
    except ValueError as error:
        raise WireError(f"{name}: {error}") from error
