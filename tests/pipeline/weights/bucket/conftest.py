"""An empty bucket, a model for it, and the account of somebody who may write there."""

from pathlib import Path

import pytest

from pipeline.runfile import Network
from pipeline.weights import bucket
from tests.pipeline.conversion import write_model
from tests.servers.bucket import running_bucket, use_account


@pytest.fixture
def served(monkeypatch):
    """An empty bucket, and nobody's credentials."""
    monkeypatch.setattr(bucket, "PUSH_NETWORK", Network(attempts=1))
    with running_bucket(monkeypatch) as server:
        yield server


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def account(tmp_path_factory, served, monkeypatch) -> None:
    """A service account, whose tokens the server gives out itself."""
    use_account(tmp_path_factory.mktemp("secret") / "key.json", served.address, monkeypatch)
