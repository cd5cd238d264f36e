"""What cannot be in memory is refused by its size; a container has some memory, and some cores."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.machine import cores, memory
from tests.errors import refused


def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    whole = memory.total()
    for limit, expected in (("max", whole), (str(2**62), whole), ("4000", 4000)):
        for name in memory.MEMORY_LIMITS:
            (tmp_path / name).write_text(f"{limit}\n")
            assert memory.total() == expected
    memory.check({"a": np.zeros(600, np.float32), "b": np.zeros(800, np.int16)}, "both", None)
    large = [np.zeros(600, np.float32), np.zeros(801, np.int16)]
    with refused("both", "1,401"):
        memory.check(large, "both", None)
    memory.check(large, "both", 4.1e-6)  # as the run file says
    with refused("both", "[runtime] memory_gb"):
        memory.check(large, "both", 4e-6)


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        (
            ("cpu.max",),
            {"max 100000": 8, "200000 100000": 2, "50000 100000": 1, "900000 100000": 8},
        ),
        (("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"), {"-1 100000": 8, "250000 100000": 3}),
    ],
)
def test_a_container_may_have_fewer_cores_than_the_machine(files, quotas, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    assert cores.count() == 8
    for quota, expected in quotas.items():
        for name, text in zip(files, [quota] if len(files) == 1 else quota.split(), strict=True):
            (tmp_path / name).write_text(f"{text}\n")
        assert cores.count() == expected


def test_room_is_that_of_the_smaller_memory(monkeypatch):
    monkeypatch.setattr(memory, "total", lambda: 10_000)
    for stats, expected in ((None, 10_000), ({"bytes_limit": 4000}, 8000)):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert memory.room.__wrapped__(2) == expected
    assert memory.room.__wrapped__(3) == 10_000
