"""Pieces of messages: cut, shown with a path, and compared."""

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
    assert pieces.distance(wire.fields(message), found) == 0
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
    pieces = Pieces((Field(F32, 4 * parameters, False),))
    assert (pieces.size, pieces.drawn) == (size, drawn)
    assert pieces.count <= MOST + 1
    taken = sketches.size_of(pieces, range(pieces.drawn)) / (4 * parameters)
    assert taken <= SHARE or pieces.drawn == 1


# ---- Distances ----


def of_one(sent: np.ndarray, here: np.ndarray, *, counted: bool = False) -> float:
    """The distance of the second piece of an array that is sent whole, or counted."""
    pieces = Pieces((Field(here.dtype, here.nbytes, counted),))
    begin, end = pieces.ranges[1][1:]
    return pieces.distance([here.tobytes()], {1: sent.tobytes()[begin:end]})


def test_the_distance_of_floats_is_relative_to_the_piece_or_its_field():
    here = RNG.standard_normal(1000).astype(np.float32)
    sent = here + RNG.standard_normal(1000).astype(np.float32) * np.float32(0.01)
    x, y = (a.astype(np.float64)[256:512] for a in (here, sent))
    scale = np.sqrt(np.mean(here.astype(np.float64) ** 2) * 256)
    expected = np.linalg.norm(y - x) / max(np.linalg.norm(x), scale)
    assert of_one(sent, here) == pytest.approx(expected, rel=1e-12)
    large = here.copy()
    large[256:512] *= 10
    x = large.astype(np.float64)[256:512]
    assert of_one(1.01 * large, large) == pytest.approx(0.01, rel=1e-4)
    small = here.copy()
    small[256:512] *= 1e-6  # as rows of rare tokens are: rounding there is nothing
    assert of_one(small + 1e-9, small) < 1e-8
    assert of_one(here, small) > 0.9


def test_codes_are_compared_as_numbers_around_128():
    here = RNG.integers(0, 256, 3000).astype(np.uint8)
    sent = here.copy()
    sent[1024:1034] ^= 1
    x, y = (a.astype(np.float64)[1024:2048] - 128 for a in (here, sent))
    scale = np.sqrt(np.mean((here.astype(np.float64) - 128) ** 2) * 1024)
    expected = np.sqrt(10) / max(np.linalg.norm(x), scale)
    assert np.linalg.norm(y - x) == np.sqrt(10)
    assert of_one(sent, here) == pytest.approx(expected, rel=1e-12)


def test_the_distance_of_signs_and_positions_is_the_share_of_others():
    here = RNG.integers(0, 256, 3000).astype(np.uint8)
    sent = here.copy()
    sent[1024:1034] ^= 1
    assert of_one(sent, here, counted=True) == 10 / 1024


def test_values_at_positions_may_be_rounded_otherwise():
    here = RNG.standard_normal(2000).astype(np.float32).astype(bfloat16)
    assert of_one((here * bfloat16(1.0078125)).astype(bfloat16), here, counted=True) == 0
    assert of_one(-here, here, counted=True) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_far(value):
    here = np.ones(1000, np.float32)
    sent = here.copy()
    sent[300] = value
    assert of_one(sent, here) == np.inf


def test_nothing_is_as_far_as_something_from_zeros():
    here = np.zeros(1000, np.float32)
    assert of_one(here, here) == 0
    assert of_one(here + 1e-9, here) == np.inf


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
