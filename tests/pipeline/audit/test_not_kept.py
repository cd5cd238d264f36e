"""Messages that are not kept: a transcript has commitments to them, and a replay names who lied."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from pipeline.witness import _messages_since
from tests.lockstep.swarm.simulated import PEERS, lab, run_of
from tests.pipeline.audit.edited.audited_run import edit_round

LIAR = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., tuple[runfile.Run, Path]]:
    """Runs of AdamW, by the fault of a peer."""

    @cache
    def one(kind: str = "") -> tuple[runfile.Run, Path]:
        fault = {"kind": kind, "peer": LIAR, "rounds": [2, 2]}
        run = run_of("dense", *([fault] if kind else []))
        folder = tmp_path_factory.mktemp("dense")
        lab("dense").train(run, folder)
        return run, folder

    return one


def audited(run: runfile.Run, folder: Path) -> list[Finding]:
    return audit(lab("dense").setup(run), Transcript(folder))


def replayed(run: runfile.Run, folder: Path) -> list[Finding]:
    replay = Replay(lab("dense").setup(run), Transcript(folder))
    outcomes = [replay.window(w, range(PEERS), lambda: None) for w in run.snapshots().windows]
    assert {outcome.why for outcome in outcomes} == {None}
    return [finding for outcome in outcomes for finding in outcome.findings]


def test_nothing_of_a_message_is_kept_and_an_honest_run_has_no_findings(trained):
    run, folder = trained()
    messages = [m for e in Transcript(folder).rounds for m in e.evidence.messages.values()]
    assert len(messages) == 8 * PEERS
    assert {(m.payload, m.offset) for m in messages} == {(None, None)}
    assert not any((folder / "payloads").iterdir())
    assert audited(run, folder) == []
    assert replayed(run, folder) == []


def edited(folder: Path, to: Path, edit: Callable[[dict], None]) -> Path:
    """A copy in which the message of peer 1 in round 3 was edited."""
    copy = shutil.copytree(folder, to)
    edit_round(copy, 3, lambda entry: edit(entry["messages"]["1"]))
    return copy


EDITS = {
    "shorter than it can be": ({"bytes": 17}, ["17", "17616"]),
    "kept": ({"payload": "00001.bin", "offset": 0}, ["00001.bin"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_cannot_be_true_of_a_message_is_a_finding_against_the_author(name, trained, tmp_path):
    run, folder = trained()
    edit, values = EDITS[name]
    found = audited(run, edited(folder, tmp_path / "copy", lambda m: m.update(edit)))
    (finding,) = [f for f in found if f.kind == "messages"]
    assert (finding.round, finding.peer, finding.applied) == (3, None, True)
    assert all(value in finding.detail for value in values)


def test_who_began_late_lacks_what_was_before_its_first_snapshot(trained, tmp_path):
    run, folder = trained()
    setup = lab("dense").setup(run)
    late = SimpleNamespace(runtime=SimpleNamespace(begins_late=True), snapshots=run.snapshots)
    setup = SimpleNamespace(run=late, start=setup.start, programs=setup.programs)
    assert _messages_since(setup, Transcript(folder)) == 0
    copy = shutil.copytree(folder, tmp_path / "late")
    shutil.rmtree(copy / "snapshots/00004")
    assert _messages_since(setup, Transcript(copy)) == 8


# ---- Liars ----


@pytest.mark.parametrize("kind", ["sign_flip", "stale", "little_enough"])
def test_the_liar_is_named_and_nobody_else(kind, trained):
    run, folder = trained(kind)
    assert audited(run, folder) == []
    assert [(f.round, f.peer, f.kind) for f in replayed(run, folder)] == [(2, LIAR, "message")]
