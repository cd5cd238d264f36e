"""One Ceph for all tests of a worker, where it is installed, and one finished run."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests import tiny
from tests.parts.volunteers import stores, volunteering
from tests.servers import ceph as ceph_server


@pytest.fixture(scope="session")
def ceph():
    if missing := ceph_server.lacking():
        pytest.skip(f"{', '.join(missing)}: not installed")
    with (
        tempfile.TemporaryDirectory(prefix="ceph") as folder,
        ceph_server.serving(Path(folder)) as address,
    ):
        yield address


@pytest.fixture
def bucket(monkeypatch):
    with stores.running_public(monkeypatch) as bucket:
        yield bucket


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run of three volunteers to its end, and of a trainer and a follower beside them."""
    return tiny.in_common(tmp_path_factory, "volunteers", volunteering.finish)


@pytest.fixture
def store(finished, tmp_path):
    """A copy of the finished run's store, to change."""
    return shutil.copytree(finished / "store", tmp_path / "store")


@pytest.fixture(scope="session")
def lying(tmp_path_factory) -> Path:
    """A window of three volunteers, of whom peer 1 lies in round 2."""
    return tiny.in_common(tmp_path_factory, "lying-volunteers", volunteering.finish_with_a_lie)
