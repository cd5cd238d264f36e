"""What cannot be in memory is refused by its size."""

import numpy as np
import pytest

from lockstep.errors import LockstepError
from pipeline.stage import memory


def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "memory.max")
    whole = memory.total()
    for limit, expected in (("max", whole), ("4000", 4000), (str(2**62), whole)):
        memory.LIMIT.write_text(f"{limit}\n")
        assert memory.total() == expected
    memory.LIMIT.write_text("4000\n")
    memory.check({"a": np.zeros(600, np.float32), "b": np.zeros(800, np.int16)}, "both", None)
    large = [np.zeros(600, np.float32), np.zeros(801, np.int16)]
    with pytest.raises(LockstepError, match="both: 1,401 numbers take 0.0 GB, expected at most"):
        memory.check(large, "both", None)
    memory.check(large, "both", 4.1e-6)  # as the run file says
    with pytest.raises(LockstepError, match="the 0.0 GB of .runtime. memory_gb$"):
        memory.check(large, "both", 4e-6)
