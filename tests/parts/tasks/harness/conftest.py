"""An exported folder and files of tasks for lm-evaluation-harness, without a network.

These tests follow each other, so that few processes import lm_eval and torch.
"""

import pytest

from tests.parts.tasks import exported
from tests.parts.tasks.harness.local_tasks import write_tasks


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return exported.write(tmp_path_factory.mktemp("exported") / "export")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    exported.go_offline(monkeypatch)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))
