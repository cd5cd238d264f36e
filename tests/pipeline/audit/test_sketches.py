"""Messages that are not kept: their roots, pieces of them, and who is named."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
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


def test_every_message_has_a_sketch_and_an_honest_run_has_no_findings(trained):
    run, folder = trained()
    transcript = Transcript(folder)
    pieces = lab("dense").programs.form.pieces
    messages = [m for e in transcript.rounds for m in e.evidence.messages.values()]
    assert len(messages) == 8 * PEERS and all(m.root and m.sketch for m in messages)
    kept = sum(path.stat().st_size for path in (folder / "payloads").iterdir())
    assert kept == sum(m.sketch for m in messages)
    assert max(m.sketch for m in messages) <= pieces.drawn * (pieces.size + 32 * 5)
    assert audited(run, folder) == []
    assert replayed(run, folder) == []


def edited(folder: Path, to: Path, edit: Callable[[dict], None]) -> Path:
    """A copy in which the message of peer 1 in round 3 was edited."""
    copy = shutil.copytree(folder, to)
    edit_round(copy, 3, lambda entry: edit(entry["messages"]["1"]))
    return copy


EDITS = {
    "root": (lambda m: m.update(root="00" * 32), "its root gives"),
    "no root": (lambda m: m.pop("root"), "has no root"),
    "no sketch": (lambda m: m.pop("sketch"), "has no sketch"),
    "elsewhere": (lambda m: m.update(offset=0), "does not lead to the root"),
    "shorter": (lambda m: m.update(sketch=3), "a sketch of 3 bytes"),
    "huge": (lambda m: m.update(sketch=2**60), "a sketch of 1152921504606846976 bytes"),
    "smaller": (lambda m: m.update(bytes=17), "has 17 bytes, expected 17616"),
    "no file": (lambda m: m.update(payload="00099.bin"), "a sketch of 0 bytes"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_sketch_that_is_not_the_messages_is_a_finding_against_the_author(name, trained, tmp_path):
    run, folder = trained()
    edit, text = EDITS[name]
    found = audited(run, edited(folder, tmp_path / "copy", edit))
    (finding,) = [f for f in found if f.kind == "sketch"]
    assert (finding.round, finding.peer, finding.applied) == (3, None, True)
    assert text in finding.detail


def test_a_transcript_without_sketches_of_large_messages_is_a_finding(
    trained, tmp_path, monkeypatch
):
    form = lab("dense").programs.form
    monkeypatch.setitem(form.__dict__, "kept", True)  # commits to the fields, not to a root
    run = run_of("dense")
    lab("dense").train(run, tmp_path)
    monkeypatch.undo()
    assert not read_json(tmp_path / "header.json").get("sketched")
    found = {(f.kind, f.peer, f.applied) for f in audited(run, tmp_path)}
    assert found == {("sketch", None, True)}


# ---- Liars ----


@pytest.mark.parametrize("kind", ["sign_flip", "stale", "little_enough"])
def test_the_liar_is_named_and_nobody_else(kind, trained):
    run, folder = trained(kind)
    assert audited(run, folder) == []
    assert [(f.round, f.peer, f.kind) for f in replayed(run, folder)] == [(2, LIAR, "message")]
