"""One run for all tests of bundles, in which a peer's sign is flipped."""

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.pipeline.audit.bundle.bundled_run import bundles_of, flipped_run


@pytest.fixture(scope="session")
def flipped(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """One of two peers sends the negative of its message, and nobody verifies."""
    return bundles_of(tiny.in_common(tmp_path_factory, "flipped", flipped_run))


@pytest.fixture(autouse=True)
def equal_runs_have_their_programs_in_common(monkeypatch):
    monkeypatch.setattr("pipeline.start.set_up.programs_of", tiny.programs_in_common)


@pytest.fixture
def folder(flipped, tmp_path) -> Path:
    """A copy of the first bundle, to change."""
    return shutil.copytree(flipped[1]["00001-00003-peer-01"], tmp_path / "bundle")
