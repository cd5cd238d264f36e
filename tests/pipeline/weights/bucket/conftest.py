"""An empty bucket, a model for it, and the account of somebody who may write there."""

from pathlib import Path

import pytest

from pipeline.net import google
from pipeline.runfile import Network
from pipeline.weights import bucket
from tests.pipeline.conversion import write_model
from tests.servers import service_account
from tests.servers.bucket import Bucket


@pytest.fixture
def served(tmp_path, monkeypatch):
    """An empty bucket, and nobody's credentials."""
    monkeypatch.delenv(google.KEY_VARIABLE, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setattr(bucket, "PUSH_NETWORK", Network(attempts=1))
    with Bucket().serving() as server:
        monkeypatch.setenv(google.EMULATOR, server.address)
        yield server


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def account(tmp_path_factory, served, monkeypatch) -> None:
    """A service account, whose tokens the server gives out itself."""
    service_account.use(tmp_path_factory.mktemp("secret") / "key.json", served.address, monkeypatch)
