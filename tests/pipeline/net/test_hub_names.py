"""Which names are paths: no hub is asked for them, whatever key has them."""

from functools import partial

import pytest

from lockstep.machine.progress import Progress
from pipeline.net.transfers import hub_files
from pipeline.runfile import Network
from pipeline.sources.token_files.remote_files import REPO_ID, list_dataset
from tests.errors import refused

NETWORK = Network(attempts=1, stall_seconds=0.1)
PATHS = ("/nothere", "./nothere", "../nothere", "~/nothere")


@pytest.mark.parametrize("name", PATHS)
def test_a_name_that_can_only_be_a_path_is_asked_for_on_no_hub(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # were a hub asked, the error would name this
    monkeypatch.chdir(tmp_path)
    rest = (None, tmp_path / "store", ("*",), "a folder", NETWORK, partial(Progress, "new"))
    with refused(name, "no such folder"):
        hub_files.download(f"Hub: {name}", name, *rest)
    with refused(name, "no such folder"):
        list_dataset(name, None, f"Hub: {name}", NETWORK)
    assert not REPO_ID.fullmatch(name)
