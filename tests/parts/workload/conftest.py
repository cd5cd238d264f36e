"""A folder workloads/ of the tests' own."""

import shutil
from pathlib import Path

import pytest

from tests.parts.workload.kinds.warm_python import warm_python

MODULES = ("strange.py", "contract_models.py")


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """The folder workloads/, with the tests' modules in it."""
    folder = tmp_path / "workloads"
    folder.mkdir()
    for name in MODULES:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    monkeypatch.setattr("parts.workload.description.SOURCE", folder)
    monkeypatch.setattr("parts.workload.worker.SOURCE", folder)
    return folder


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A Python for workers that has imported torch."""
    with warm_python(tmp_path_factory.mktemp("warm"), "torch") as path:
        yield path
