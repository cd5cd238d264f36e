"""Files far away, short waits between attempts, and a gate for what hangs."""

import threading
from collections.abc import Iterator

import pytest

from pipeline.net import limits, remote
from tests.pipeline.net.stream.far import Far


@pytest.fixture
def far(monkeypatch) -> Far:
    far = Far()
    monkeypatch.setattr(remote, "read_once", far.read_once)
    return far


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(limits, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(limits, "JITTER_SECONDS", 0.001)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs waits for this."""
    gate = threading.Event()
    yield gate
    gate.set()
