"""A server of each kind and a project, in haste and in time."""

from pathlib import Path

import pytest

from pipeline.net import limits
from tests.linear import in_time
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.token_servers import TRUTH

IN_TIME = 8  # seconds: a server that says nothing is left after half a second, three times


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Waits of hundredths of a second between attempts, whatever they should be."""
    brief = lambda seconds, cancelled: cancelled.wait(min(seconds, 0.02))  # noqa: E731
    monkeypatch.setattr(limits, "pause", brief)


@pytest.fixture(autouse=True)
def ends_in_time():
    """No server keeps a client for ever."""
    with in_time(IN_TIME):
        yield


@pytest.fixture
def source(request, tmp_path, monkeypatch):
    """A server of the kind that is asked for."""
    with sources.serving(request.param, TRUTH, tmp_path / "home", monkeypatch) as found:
        yield found


@pytest.fixture
def root(tmp_path) -> Path:
    """A project, with nothing beside it but what belongs to the servers."""
    (folder := tmp_path / "project").mkdir()
    return folder
