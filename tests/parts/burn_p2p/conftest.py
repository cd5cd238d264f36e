"""Workers of `parts/workload`, without which this part has nobody to ask."""

import pytest

from tests.offered import PARTS

if "workload" in PARTS:
    from tests.parts.workload.conftest import folder, host, model_id, module, source  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def packs(module):
    """What of a state travels, as the worker has it."""
    return module("lockstep_worker.packs")
