"""Streams in place of those of the network, for tests of files elsewhere."""

import sys
from types import SimpleNamespace

import pytest

from tests.pipeline.tokens.shards_folder import FakeStreams


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "pipeline.net.transfers.stream", SimpleNamespace(Streams=FakeStreams)
    )
