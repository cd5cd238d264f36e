"""One Ceph for all tests of a worker, where it is installed."""

import tempfile
from pathlib import Path

import pytest

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
