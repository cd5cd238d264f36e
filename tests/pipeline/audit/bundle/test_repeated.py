"""A finding is repeated with its bundle alone, which holds what that needs and nothing else."""

from pathlib import Path

import pytest

from lockstep.transcript.trees import load_nested
from pipeline.audit import bundle
from tests import tiny
from tests.pipeline.audit.bundle.bundled_run import FLIP, OPENING, TWO_LIARS, bundles

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """The run of `flipped` with dense messages, which are not kept."""
    changes = {"faults__schedule": [FLIP], "model__LLM__optimizer": tiny.ADAMW}
    return bundles(tmp_path_factory.mktemp("dense"), **changes)


@pytest.fixture(scope="module")
def verified(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """A verifier accuses an honest peer, and another peer sends what it did not commit to."""
    return bundles(tmp_path_factory.mktemp("verified"), **TWO_LIARS)


def test_it_holds_what_the_replay_needs_and_nothing_else(flipped):
    (path,) = flipped[1].values()
    assert set(tiny.contents(path)) == {
        "bundle.json",
        "run.json",
        "tokens.safetensors",
        "transcript/header.json",
        "transcript/rounds.jsonl",
        "transcript/payloads/00001.bin",
        f"{OPENING}/state.json",
        f"{OPENING}/params.safetensors",
        f"{OPENING}/shared.safetensors",
        f"{OPENING}/own-001.safetensors",
        "transcript/snapshots/00003/state.json",
        "transcript/snapshots/00003/params.safetensors",
        "transcript/snapshots/00003/shared.safetensors",
    }
    assert len((path / "transcript/rounds.jsonl").read_text().splitlines()) == 3
    tokens = load_nested(path / "tokens.safetensors")
    assert tokens["rows"].shape == (tokens["indices"].size, 16) == (6, 16)  # 2 in each of 3 rounds


def test_where_messages_are_not_kept_it_holds_all_peers(dense, capsys):
    verdict, found = dense
    (path,) = found.values()
    assert verdict["findings"][0]["bundle"] == f"bundles/{path.name}"
    names = set(tiny.contents(path))
    assert {f"{OPENING}/own-{peer:03}.safetensors" for peer in (0, 1)} <= names
    assert not any("payloads" in name for name in names)
    assert bundle.show(path, 1) == 0
    assert "1 of 1 findings confirmed, compared bit for bit" in capsys.readouterr().out


def test_a_false_check_is_repeated_by_taking_the_step_of_the_accused(verified, capsys):
    verdict, found = verified
    (finding,) = [f for f in verdict["findings"] if f["kind"] == "check"]
    path = found[Path(finding["bundle"]).name]
    accused = finding["detail"].split()[5]
    assert f"recomputed the step of peer {accused} as" in finding["detail"] and finding["peer"] == 0
    owned = [name for name in tiny.contents(path) if "own-" in name]
    assert owned == [f"{OPENING}/own-{int(accused):03}.safetensors"]
    assert bundle.show(path, 1) == 0
    assert capsys.readouterr().out.count(finding["detail"]) == 2


def test_another_payload_than_was_committed_to_is_repeated_without_training(verified, capsys):
    verdict, found = verified
    (finding,) = [f for f in verdict["findings"] if f["kind"] == "commitment"]
    path = found[Path(finding["bundle"]).name]
    assert verdict["accepted"] and finding["peer"] == 4
    names = set(tiny.contents(path))
    assert not any("snapshots" in name for name in names) and "tokens.safetensors" not in names
    assert bundle.show(path, 1) == 0
    assert "1 of 1 findings confirmed, by decoding what was sent" in capsys.readouterr().out
