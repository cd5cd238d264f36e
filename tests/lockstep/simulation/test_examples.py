"""Examples come in the order that the seed says, wherever a peer reads."""

import hashlib

import numpy as np

from lockstep.programs.permutation import permute
from lockstep.simulation.examples import BLOCK, data_of_peers

COUNT = BLOCK - 10  # examples, so that the second pass begins within the first block


def test_each_place_has_the_example_of_its_pass():
    (data,) = data_of_peers(np.arange(COUNT), 1, seed=7, shuffle=True)
    places = np.array([0, COUNT - 1, COUNT, BLOCK - 1, BLOCK, 2 * COUNT + 5])
    numbers = places // COUNT
    seeds = [
        hashlib.sha256(f"lockstep/simulate:7:{number}".encode()).digest() for number in numbers
    ]
    expected = [
        int(permute(seed, np.array([place % COUNT]), COUNT)[0])
        for seed, place in zip(seeds, places, strict=True)
    ]
    assert data.take(places).examples.tolist() == expected
    (plain,) = data_of_peers(np.arange(COUNT), 1, seed=7, shuffle=False)
    assert plain.take(places).examples.tolist() == (places % COUNT).tolist()
