"""Faults fire when, and only when, the schedule says so; every kind there is has a corruption."""

from typing import get_args

import numpy as np

from pipeline import config
from pipeline.optim.distro import Coefficients
from pipeline.swarm.faults import CORRUPT, Faults

SIGNS = {"w": Coefficients(np.array([[0, 2]], np.uint8), np.array([[True, False]]))}


def test_every_kind_of_the_configuration_has_a_corruption():
    assert set(CORRUPT) == set(get_args(config.FaultKind))


def test_sign_flip_fires_in_its_rounds_for_its_peer_only():
    faults = Faults([config.Fault(kind="sign_flip", peer=2, rounds=(3, 4))])
    for peer, step in ((2, 2), (2, 5), (1, 3)):
        assert faults.corrupt(SIGNS, peer, step) is SIGNS
    assert faults.fired["sign_flip"] == 0
    flipped = faults.corrupt(SIGNS, 2, 3)["w"]
    assert flipped.value_NK.tolist() == [[False, True]]
    assert flipped.index_NK.tolist() == [[0, 2]]
    assert faults.fired["sign_flip"] == 1


def test_sign_flip_negates_real_values_and_gradients():
    faults = Faults([config.Fault(kind="sign_flip", peer=0, rounds=(1, 1))])
    values = {"w": Coefficients(np.array([[7]], np.uint8), np.array([[1.5]], np.float32))}
    assert faults.corrupt(values, 0, 1)["w"].value_NK.tolist() == [[-1.5]]
    assert faults.corrupt({"w": np.array([1.0, -2.0])}, 0, 1)["w"].tolist() == [-1.0, 2.0]
