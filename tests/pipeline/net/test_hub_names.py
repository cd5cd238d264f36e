"""Which names are paths: no hub is asked for them, whatever command they were given to."""

from functools import partial

import pytest

from lockstep.errors import LockstepError
from lockstep.machine.progress import Progress
from parts.new.starting_model import model_named
from parts.publication import fetch
from pipeline.net.transfers import hub_files
from pipeline.runfile import Network
from pipeline.sources.token_files.hub import REPO_ID, list_dataset

NETWORK = Network(attempts=1, stall_seconds=0.1)


@pytest.mark.parametrize("name", ["/nothere", "./nothere", "../nothere", "~/nothere"])
def test_a_name_that_can_only_be_a_path_is_asked_for_on_no_hub(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # were a hub asked, the error would name this
    monkeypatch.chdir(tmp_path)
    rest = (None, tmp_path / "store", ("*",), "a folder", NETWORK, partial(Progress, "new"))
    asked = {
        "verify": lambda: fetch.find(name, tmp_path, fetch.Limits(1, NETWORK)),
        "a run file's model": lambda: hub_files.download(f"Hub: {name}", name, *rest),
        "a run file's data": lambda: list_dataset(name, None, f"Hub: {name}", NETWORK),
        "new --model": lambda: model_named(name, tmp_path),
    }
    for door, ask in asked.items():
        with pytest.raises(LockstepError, match="no such folder, expected") as caught:
            ask()
        assert name in str(caught.value), door
    assert not REPO_ID.fullmatch(name)
