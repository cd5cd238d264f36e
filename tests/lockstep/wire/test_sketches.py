"""Which pieces are drawn: by nobody's choice, as long as a commitment is unknown."""

import hashlib

import numpy as np
import pytest

from lockstep.protocol.committee import round_seed
from lockstep.wire import sketches

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


@pytest.mark.parametrize("of", [0, 3])
def test_every_commitment_of_the_round_decides_what_is_drawn(of):
    drawn = sketches.drawn(7, 5, COMMITMENTS, 3, 1000, 20)
    other = sketches.drawn(7, 5, COMMITMENTS | {of: "ac" * 32}, 3, 1000, 20)
    assert len(set(drawn) & set(other)) < 5
    assert (
        sketches.drawn(7, 5, COMMITMENTS, 0, 1000, 20)
        != drawn
        != sketches.drawn(8, 5, COMMITMENTS, 3, 1000, 20)
    )


def test_a_lie_in_a_share_of_the_pieces_is_missed_as_often_as_its_share_says():
    pieces, count, share, trials = 400, 12, 0.1, 2000
    false = set(range(int(share * pieces)))
    missed = sum(
        not false.intersection(sketches.drawn(n, 1, COMMITMENTS, 0, pieces, count))
        for n in range(trials)
    )
    expected = np.prod([1 - len(false) / (pieces - i) for i in range(count)])  # all different
    assert expected <= (1 - share) ** count
    assert missed / trials == pytest.approx(expected, abs=4 * np.sqrt(expected / trials))


def test_all_pieces_can_be_drawn():
    assert sketches.drawn(7, 5, COMMITMENTS, 3, 9, 9) == list(range(9))
