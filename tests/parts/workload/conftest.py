"""A folder workloads/ of the tests' own, the worker's modules here, and a finished run."""

import importlib
import shutil
from pathlib import Path

import pytest

from parts.workload.process.worker_process import PYTHON
from tests import tiny
from tests.parts.conftest import quickly
from tests.parts.workload import finished_run
from tests.parts.workload.worker_host import Host

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


@pytest.fixture
def module(monkeypatch):
    """Import a module here that a worker finds, or that is in one of some folders."""

    def imported(name: str, *folders: Path):
        for place in (*PYTHON, *folders):
            monkeypatch.syspath_prepend(str(place))
        return importlib.import_module(name)

    return imported


@pytest.fixture(scope="session")
def finished(tmp_path_factory, python) -> finished_run.Finished:
    with quickly(python):
        return finished_run.read(tiny.in_common(tmp_path_factory, "workload", finished_run.make))


# ---- A worker of a plain workload ----


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with its module."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copy(Path(__file__).with_name("worker") / "plain.py", folder)
    return folder


@pytest.fixture(scope="session")
def host(folder):
    with Host("plain:Plain", {"a": 1}, folder) as host:
        yield host


@pytest.fixture
def model_id(host):
    return host.ask("init_model", device="cpu")["model_id"]
