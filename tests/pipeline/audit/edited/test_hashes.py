"""Snapshots of which only the hashes are kept."""

import shutil
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from tests.lockstep.swarm.simulated import lab, run_of
from tests.pipeline.audit.edited.audited_run import Audited, record

pytestmark = pytest.mark.long


def sparse(folder: Path, *schedule: dict) -> Audited:
    """A run of 8 rounds with hashes after every second, kept whole after 0, 4 and 8."""
    run = run_of("signs", *schedule)
    witness = run.witness.model_copy(update={"snapshot_every": 2, "keep_every": 2})
    run = run.model_copy(update={"witness": witness})
    lab("signs").train(run, folder)
    return Audited(run, folder)


@pytest.fixture(scope="module")
def hashed(tmp_path_factory) -> Audited:
    return sparse(tmp_path_factory.mktemp("hashed"))


def test_snapshots_kept_as_hashes_take_no_space_and_audit_clean(hashed):
    transcript = Transcript(hashed.folder)
    assert (transcript.snapshots, transcript.kept_snapshots) == ([0, 2, 4, 6, 8], [0, 4, 8])
    assert [f.name for f in (hashed.folder / "snapshots" / "00002").iterdir()] == ["state.json"]
    assert hashed.findings == hashed.replay(hashed.folder) == []


def test_a_lie_in_a_longer_window_is_found(tmp_path):
    run = sparse(tmp_path, {"kind": "sign_flip", "peer": 4, "rounds": [7, 7]})
    assert run.findings == []
    assert [(f.round, f.peer, f.kind) for f in run.replay(tmp_path)] == [(7, 4, "message")]


@pytest.mark.parametrize("name", ["params", "own"])
def test_a_false_hash_within_a_window_is_found_in_its_round(hashed, tmp_path, name):
    def edit(recorded: dict) -> None:
        recorded["own"][3] = "ab" * 32
        if name == "params":
            recorded["params"] = "ab" * 32

    folder = shutil.copytree(hashed.folder, tmp_path / "transcript")
    record(folder, 6, edit)
    assert hashed.audit(folder) == []
    found = [(f.round, f.peer, f.kind) for f in hashed.replay(folder)]
    state, params = (6, 3, "state"), (6, None, "params")
    assert found == ([params, state] if name == "params" else [state])


def test_hashes_that_are_missing_are_one_line_of_error(hashed, tmp_path):
    folder = shutil.copytree(hashed.folder, tmp_path / "transcript")
    record(folder, 6, lambda recorded: recorded.pop("own"))
    with pytest.raises(LockstepError, match=r"00006/state\.json: own: missing"):
        hashed.replay(folder)
