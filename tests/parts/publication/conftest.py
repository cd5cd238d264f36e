"""One published run for all tests of publications."""

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.parts.publication import published_run
from tests.parts.publication.published_run import Published


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Published:
    return Published(tiny.in_common(tmp_path_factory, "published", published_run.make))


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of the publication, to change."""
    return shutil.copytree(published.folder, tmp_path / "folder")
