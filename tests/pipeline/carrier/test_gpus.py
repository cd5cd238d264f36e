"""Peers' processes share a host's GPUs."""

import pytest

from pipeline.carrier import gpus


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
    made = [gpus.environment(peer, gpus.visible(there), parts) for peer in range(peers)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in made] == seen


def test_gpus_that_the_user_named_are_the_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpus.environment(1, gpus.visible(2), 1) == {"CUDA_VISIBLE_DEVICES": "7"}
