"""Peers' processes share a host's GPUs."""

import pytest

from parts.carrier.remote_peers import gpus_of


@pytest.mark.parametrize(
    ("peers", "there", "parts", "seen"),
    [
        (4, 4, 1, ["0", "1", "2", "3"]),
        (4, 2, 1, ["0", "1", "0", "1"]),
        (2, 5, 2, ["0,1", "2,3"]),
        (3, 1, 1, ["0", "0", "0"]),
    ],
)
def test_peers_are_spread_over_the_gpus(peers, there, parts, seen):
    assert [gpus_of(peer, there, parts) for peer in range(peers)] == seen


def test_gpus_that_the_user_named_are_the_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpus_of(1, 2, 1) == "7"
