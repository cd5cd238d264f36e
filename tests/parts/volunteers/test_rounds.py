"""Volunteers in real processes, over a folder."""

import json
import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long

PEERS = 3


def messages(transcript: Path) -> list:
    lines = (transcript / "rounds.jsonl").read_text().splitlines()
    return [
        {
            "applied": found["decision"]["applied"],
            "loss": found["loss"],
            "held_out_loss": found["held_out_loss"],
            "assignment": found["round"]["assignment"],
            "commitments": {p: m["commitment"] for p, m in found["evidence"]["messages"].items()},
        }
        for found in map(json.loads, lines)
    ]


def states(transcript: Path) -> dict[str, dict]:
    found = sorted((transcript / "snapshots").glob("*/state.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in found}


def test_volunteers_in_time_end_as_peers_of_one_process(finished):
    expected = volunteering.transcript(finished, "lab")
    of_all = [volunteering.transcript(finished, name) for name in volunteering.FINISHED]
    assert len({(one / "rounds.jsonl").read_bytes() for one in of_all}) == 1
    for one in of_all:
        assert messages(one) == messages(expected)
        assert tiny.contents(one / "payloads") == tiny.contents(expected / "payloads")
        assert states(one) == states(expected)


@pytest.mark.parametrize("name", ["000", "follower"])
def test_first_window_of_each_is_replayed_anywhere_and_the_second_where_its_peer_lives(
    finished, name, tmp_path
):
    root = shutil.copytree(finished / name, tmp_path / "root")
    tiny.make(root / "run.toml", root, "witness")
    verdict = json.loads((root / "data" / "verdict" / "verdict.json").read_text())
    assert (verdict["accepted"], verdict["findings"], verdict["clock"]) == (True, [], "store")
    assert len(verdict["replayed_windows"]) == PEERS + (name != "follower")
