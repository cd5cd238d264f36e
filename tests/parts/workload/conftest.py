"""A folder workloads/ of the tests' own."""

import shutil
from pathlib import Path

import pytest

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
    monkeypatch.setattr("pipeline.audit.unchecked_bundle.PROJECT", tmp_path)
    return folder
