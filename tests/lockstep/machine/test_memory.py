"""What cannot be in memory is refused by its size."""

from types import SimpleNamespace

import jax
import numpy as np

from lockstep.machine import memory
from tests.errors import refused


def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    whole = memory.total()
    for limit, expected in (("max", whole), ("4000", 4000), (str(2**62), whole)):
        memory.CONTAINER_LIMIT.write_text(f"{limit}\n")
        assert memory.total() == expected
    memory.CONTAINER_LIMIT.write_text("4000\n")
    memory.check({"a": np.zeros(600, np.float32), "b": np.zeros(800, np.int16)}, "both", None)
    large = [np.zeros(600, np.float32), np.zeros(801, np.int16)]
    with refused("both", "1,401"):
        memory.check(large, "both", None)
    memory.check(large, "both", 4.1e-6)  # as the run file says
    with refused("both", "[runtime] memory_gb"):
        memory.check(large, "both", 4e-6)


def test_room_is_that_of_the_smaller_memory(monkeypatch):
    monkeypatch.setattr(memory, "total", lambda: 10_000)
    for stats, expected in ((None, 10_000), ({"bytes_limit": 4000}, 8000)):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert memory.room.__wrapped__(2) == expected
    assert memory.room.__wrapped__(3) == 10_000
