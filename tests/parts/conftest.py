"""Workers that start at once, for the parts that start them."""

import sys
from types import SimpleNamespace

import pytest

from tests.parts.warm_python import warm_python


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A Python for workers that has imported torch."""
    with warm_python(tmp_path_factory.mktemp("warm"), "torch") as path:
        yield path


@pytest.fixture(scope="module")
def quick_workers(python):
    """Have that Python where a run names none: torch takes seconds to import, for each worker."""
    with pytest.MonkeyPatch.context() as patch:
        mine = SimpleNamespace(**vars(sys) | {"executable": python})
        patch.setattr("parts.workload.worker.sys", mine)
        yield
