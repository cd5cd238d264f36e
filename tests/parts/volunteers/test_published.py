"""What volunteers trained is audited, exported, published and verified as any run."""

import shutil

import pytest

from parts.publication import publish, readers_checks
from parts.publication.layout import ReaderAsks
from tests import tiny
from tests.parts.publication.published_run import LIMITS

pytestmark = pytest.mark.long


def test_run_of_volunteers_is_published_and_verified(finished, tmp_path):
    root, folder = shutil.copytree(finished / "000", tmp_path / "root"), tmp_path / "published"
    tiny.make(root / "run.toml", root, "witness", "export", "evaluate", "report")
    publish.write(folder, root / "run.toml", root, 6, None)
    with tiny.like_a_process():
        verified = readers_checks.verify_publication(
            str(folder), tmp_path / "reader", LIMITS, ReaderAsks()
        )
    windows = verified.claim("windows").values
    assert windows["repeated"] == [(1, 3, 0), (1, 3, 1), (1, 3, 2)]
    assert windows["total"] == 6
    assert verified.claim("weights").kind == "proven"
