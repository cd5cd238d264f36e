"""Volunteers in real processes, over a folder."""

import json
from pathlib import Path

from tests import tiny
from tests.parts.volunteers import volunteering

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


def test_volunteers_in_time_end_as_peers_of_one_process(tmp_path):
    names = [f"{peer:03}" for peer in range(PEERS)]
    volunteering.opened(tmp_path, PEERS, alone=True)
    started = [volunteering.train(tmp_path, name) for name in (*names, "follower")]
    assert volunteering.ended(started) == [0] * (PEERS + 1), volunteering.output(tmp_path)

    expected = volunteering.transcript(tmp_path, "lab")
    of_all = [volunteering.transcript(tmp_path, name) for name in (*names, "follower")]
    assert len({(one / "rounds.jsonl").read_bytes() for one in of_all}) == 1
    for one in of_all:
        assert messages(one) == messages(expected)
        assert tiny.contents(one / "payloads") == tiny.contents(expected / "payloads")
        assert states(one) == states(expected)

    # the first window of each can be replayed anywhere, the second where its peer lives
    for name in ("000", "follower"):
        root = tmp_path / name
        tiny.by_hand(root / "run.toml", root, "witness")
        verdict = json.loads((root / "data" / "verdict" / "verdict.json").read_text())
        assert (verdict["accepted"], verdict["findings"], verdict["clock"]) == (True, [], "store")
        assert len(verdict["replayed_windows"]) == PEERS + (name != "follower")
