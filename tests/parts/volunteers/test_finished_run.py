"""A finished run of volunteers: its rounds are those of one process, audited and published."""

import json
import shutil
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.state import StateHashes
from lockstep.transcript.transcript import Transcript
from parts.publication import publish, readers_checks
from parts.publication.layout import ReaderAsks
from parts.volunteers import stored_run
from parts.volunteers.lab import opening
from pipeline import runfile
from pipeline.stage.artifacts import Paths
from pipeline.start import set_up
from tests import tiny
from tests.parts.publication.published_run import LIMITS
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long

PEERS = 3


def messages(rounds: list[dict]) -> list:
    return [
        {
            "applied": found["decision"]["applied"],
            "loss": found["loss"],
            "held_out_loss": found["held_out_loss"],
            "assignment": found["round"]["assignment"],
            "commitments": {p: m["commitment"] for p, m in found["evidence"]["messages"].items()},
        }
        for found in rounds
    ]


def states(transcript: Path) -> dict[int, StateHashes]:
    found = Transcript(transcript)
    return {step: found.hashes(step) for step in found.snapshots}


def test_volunteers_in_time_end_as_peers_of_one_process(finished):
    expected = volunteering.transcript(finished, "lab")
    rounds = volunteering.rounds(finished, *volunteering.FINISHED)
    assert messages(rounds) == messages(volunteering.rounds(finished, "lab"))
    for name in volunteering.FINISHED:
        found = volunteering.transcript(finished, name)
        assert tiny.contents(found / "payloads") == tiny.contents(expected / "payloads")
        assert states(found) == states(expected)


@pytest.mark.parametrize("name", ["000", "follower"])
def test_first_window_of_each_is_replayed_anywhere_and_the_second_where_its_peer_lives(
    finished, name, tmp_path
):
    root = shutil.copytree(finished / name, tmp_path / "root")
    tiny.make(root / "run.toml", root, "witness")
    verdict = json.loads((root / "data" / "verdict" / "verdict.json").read_text())
    assert (verdict["accepted"], verdict["findings"], verdict["clock"]) == (True, [], "store")
    assert len(verdict["replayed_windows"]) == PEERS + (name != "follower")


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


def test_machine_takes_the_runs_first_step_as_the_lab_did(finished):
    file = finished / "000" / "run.toml"
    run, paths = runfile.load(file), Paths("train", file, finished / "000")
    with tiny.like_a_process():
        setup = set_up.read(run, paths.out("convert"), paths.out("download"))
        document = opening.document_of(setup, f"ed25519:{'0' * 64}", set_up.self_test(setup))
        stored_run._check_step(setup, document, "a store")
        other = document.model_copy(update={"self_test": "ab" * 32})
        with pytest.raises(LockstepError, match="a first step here gives .*, expected abababab"):
            stored_run._check_step(setup, other, "a store")
        stored_run._check_step(setup, document.model_copy(update={"self_test": None}), "a store")
