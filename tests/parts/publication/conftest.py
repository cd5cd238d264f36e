"""One published run for all tests of publications."""

import shutil
from pathlib import Path

import pytest

from tests.parts.publication.published_run import Published


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Published:
    return Published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of the publication, to change."""
    return shutil.copytree(published.folder, tmp_path / "folder")
