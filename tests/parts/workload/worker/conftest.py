"""One worker of a plain workload for all these tests, and a model in it."""

import shutil
from pathlib import Path

import pytest

from tests.parts.workload.worker_host import Host


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    shutil.copy(Path(__file__).with_name("plain.py"), folder)
    return folder


@pytest.fixture(scope="session")
def host(folder):
    with Host("plain:Plain", {"a": 1}, folder) as host:
        yield host


@pytest.fixture
def model_id(host):
    return host.ask("init_model", device="cpu")["model_id"]
