"""Pieces of messages: cut, and shown with a path."""

import hashlib

import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.protocol import sets
from lockstep.protocol.committee import round_seed
from lockstep.wire import message as wire
from lockstep.wire import sketches
from lockstep.wire.message import Form
from lockstep.wire.pieces import MOST, SHARE, Field, Pieces

RNG = np.random.default_rng(5)
F32 = np.dtype(np.float32)
DENSE = {
    "a": RNG.standard_normal((3, 700)).astype(np.float32),
    "b": RNG.integers(0, 256, 1500).astype(np.uint8),
    "c": RNG.standard_normal(600).astype(np.float32).astype(bfloat16),
    "d": np.zeros(0, np.float32),
}
SPARSE = {
    "signs": Coefficients(
        np.tile(np.arange(40, dtype=np.uint8), (40, 1)), RNG.random((40, 40)) < 0.5
    ),
    "values": Coefficients(
        np.tile(np.arange(30, dtype=np.uint16), (50, 1)),
        RNG.standard_normal((50, 30)).astype(np.float32).astype(bfloat16),
    ),
}


def form_of(message: dict) -> Form:
    areas = {name: 40 if message is SPARSE else 0 for name in message}
    return Form(message, areas, "lockstep", 1)


@pytest.mark.parametrize("message", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_pieces_are_all_of_a_message_and_none_spans_two_fields(message):
    pieces = form_of(message).pieces
    cut = list(pieces.cut(wire.fields(message)))
    assert len(cut) == pieces.count == len(pieces.ranges)
    assert b"".join(cut) == b"".join(wire.fields(message))
    assert [len(piece) for piece in cut] == [end - begin for _, begin, end in pieces.ranges]
    sizes = [field.bytes for field in pieces.fields]
    assert sizes == [len(memoryview(field)) for field in wire.fields(message)]
    assert max(map(len, cut)) <= pieces.size


@pytest.mark.parametrize("message", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_sketch_shows_its_pieces_and_nothing_else_passes_for_them(message):
    pieces = form_of(message).pieces
    tree = sets.MerkleTree.over(pieces.cut(wire.fields(message)))
    drawn = [0, pieces.count // 2, pieces.count - 1]
    sketch = sketches.sketch_of(pieces, wire.fields(message), tree, drawn)
    assert len(sketch) == sketches.size_of(pieces, drawn)
    found = sketches.read(pieces, sketch, drawn, tree.root)
    cut = [bytes(piece) for piece in pieces.cut(wire.fields(message))]
    assert found == {n: cut[n] for n in drawn}
    for at in range(0, len(sketch), 97):
        bent = bytearray(sketch)
        bent[at] ^= 1
        with pytest.raises(ValueError, match="does not lead to the root"):
            sketches.read(pieces, bytes(bent), drawn, tree.root)
    swapped = sketch[len(sketch) // 2 :] + sketch[: len(sketch) // 2]
    with pytest.raises(ValueError, match="does not lead to the root"):
        sketches.read(pieces, swapped, drawn, tree.root)
    for other in (sketch[:-1], sketch + b"x", b""):
        with pytest.raises(ValueError, match=f"{len(other)} bytes, expected {len(sketch)}"):
            sketches.read(pieces, other, drawn, tree.root)


@pytest.mark.parametrize(
    ("parameters", "size", "drawn"),
    [(100, 1024, 1), (36_000, 1024, 1), (1_852_544, 1024, 51), (2**30, 2**16, 256)],
)
def test_a_sketch_takes_at_most_a_hundredth_of_a_message_unless_it_is_one_piece(
    parameters, size, drawn
):
    pieces = Pieces((Field(F32, 4 * parameters),))
    assert (pieces.size, pieces.drawn) == (size, drawn)
    assert pieces.count <= MOST + 1
    taken = sketches.size_of(pieces, range(pieces.drawn)) / (4 * parameters)
    assert taken <= SHARE or pieces.drawn == 1


# ---- Which pieces are drawn: by nobody's choice, as long as a commitment is unknown ----


COMMITMENTS = {3: "ab" * 32, 0: "cd" * 32}


def test_pieces_are_drawn_as_documented():
    seed = round_seed(7, 6)  # of the next round
    draw = hashlib.sha256(
        f"lockstep/sketch:{seed}:".encode()
        + (0).to_bytes(4, "little") + b"\xcd" * 32
        + (3).to_bytes(4, "little") + b"\xab" * 32
    ).digest()  # fmt: skip
    found, number = set(), 0
    while len(found) < 4:
        words = (3).to_bytes(4, "little") + number.to_bytes(4, "little")
        found.add(int.from_bytes(hashlib.sha256(draw + words).digest()[:8], "little") % 9)
        number += 1
    assert sketches.drawn(7, 5, COMMITMENTS, 3, 9, 4) == sorted(found)
