"""Snapshots of which only the hashes are kept."""

import shutil
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from tests.pipeline.audit.edited.audited_run import Audited, record, rows, trained

pytestmark = pytest.mark.long

SPARSE = {"snapshot_every": 2, "keep_every": 2}  # of 8 rounds, kept whole after 0, 4 and 8


@pytest.fixture(scope="module")
def hashed(tmp_path_factory) -> Audited:
    return trained(tmp_path_factory.mktemp("hashed"), snapshots=SPARSE)


@pytest.fixture
def folder(hashed, tmp_path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(hashed.folder, tmp_path / "transcript")


def test_snapshots_kept_as_hashes_take_no_space_and_audit_clean(hashed):
    transcript = Transcript(hashed.folder)
    assert (transcript.snapshots, transcript.kept_snapshots) == ([0, 2, 4, 6, 8], [0, 4, 8])
    assert [f.name for f in (hashed.folder / "snapshots" / "00002").iterdir()] == ["state.json"]
    assert hashed.findings == hashed.replay() == []


def test_a_lie_in_a_longer_window_is_found(tmp_path):
    run = trained(tmp_path, {"kind": "sign_flip", "peer": 4, "rounds": [7, 7]}, snapshots=SPARSE)
    assert run.findings == [] and rows(run.replay()) == [(7, 4, "message")]


@pytest.mark.parametrize("name", ["params", "own"])
def test_a_false_hash_within_a_window_is_found_in_its_round(hashed, folder, name):
    def edit(recorded: dict) -> None:
        recorded["own"][3] = "ab" * 32
        if name == "params":
            recorded["params"] = "ab" * 32

    record(folder, 6, edit)
    assert hashed.audit(folder) == []
    state, params = (6, 3, "state"), (6, None, "params")
    assert rows(hashed.replay(folder)) == ([params, state] if name == "params" else [state])


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda state: state.pop("own"), "snapshots/00006/state.json: own: missing"),
        (lambda state: state["own"].pop(), "state.json is of step 6 and 5 peers, expected 6 and 6"),
        (None, "snapshots/00006/state.json: No such file or directory, expected hashes of a state"),
    ],
    ids=["no field", "of fewer peers", "no file"],
)
def test_hashes_that_are_not_of_all_peers_are_a_finding_against_the_author(
    hashed, folder, edit, text
):
    if edit:
        record(folder, 6, edit)
    else:
        (folder / "snapshots/00006/state.json").unlink()
    (finding,) = hashed.audit(folder)
    assert (finding.round, finding.peer, finding.kind) == (6, None, "snapshot")
    assert finding.detail.startswith(text)
    with pytest.raises(LockstepError, match=text):  # of a bundle, whose snapshots were not audited
        hashed.replay(folder)
