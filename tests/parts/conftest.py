"""Workers that start at once, for the parts that start them."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.parts.warm_python import warm_python


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A Python for workers that has imported torch."""
    with warm_python(tmp_path_factory.mktemp("warm"), "torch") as path:
        yield path


@pytest.fixture(scope="session")
def hugging_face_python(tmp_path_factory):
    """The same with Hugging Face's libraries too."""
    with warm_python(tmp_path_factory.mktemp("warm"), "transformers", "peft", "accelerate") as path:
        yield path


@contextmanager
def quickly(python: str):
    """Have that Python where a run names none: torch takes seconds to import, for each worker."""
    with pytest.MonkeyPatch.context() as patch:
        mine = SimpleNamespace(**vars(sys) | {"executable": python})
        patch.setattr("parts.workload.worker.sys", mine)
        yield


@pytest.fixture(scope="module")
def quick_workers(python):
    with quickly(python):
        yield
