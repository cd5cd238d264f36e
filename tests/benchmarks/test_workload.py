"""What a workload costs is measured on the same steps: a tiny model, once."""

import argparse
import sys

import pytest

from benchmarks import workload

pytestmark = pytest.mark.long


def test_each_kind_of_step_is_timed():
    chosen = argparse.Namespace(
        size="tiny",
        repeats=1,
        threads=1,
        rows=2,
        length=8,
        micro_batch=2,
        local_steps=2,
        python=sys.executable,
    )
    found = workload.measure(chosen)
    assert found["parameters"] > 1000 and found["tokens"] == 16
    kinds = ("torch_gradient", "gradient", "torch_adamw", "diloco", "distro")
    assert all(found[f"{kind}_milliseconds"] > 0 for kind in kinds)
    assert found["gradient_of_torch"] > 0
