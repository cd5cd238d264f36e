"""The benchmark of packs."""

from benchmarks import packs


def test_packs_of_both_ends_are_timed():
    found = packs.measure(1000, 2)
    kinds = ("write", "read", "worker_write", "worker_read", "sha256")
    assert all(found[f"{kind}_milliseconds"] >= 0 for kind in kinds)
