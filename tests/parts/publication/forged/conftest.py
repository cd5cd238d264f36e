"""A copy of a publication for each forgery."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of a publication with all windows, to change."""
    return shutil.copytree(published.whole, tmp_path / "folder")
