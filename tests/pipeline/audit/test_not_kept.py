"""Messages that are not kept: a transcript has commitments to them; test_detection has who lies."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.transcript.transcript import Transcript
from pipeline.witness import _messages_since
from tests.lockstep.swarm.simulated import PEERS, lab
from tests.pipeline.audit.edited.audited_run import Audited, edit_round, rows, trained


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Audited:
    """A run of AdamW."""
    return trained(tmp_path_factory.mktemp("dense"), form="dense")


@pytest.fixture
def folder(honest, tmp_path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(honest.folder, tmp_path / "transcript")


def test_nothing_of_a_message_is_kept_and_an_honest_run_has_no_findings(honest):
    messages = [m for e in Transcript(honest.folder).rounds for m in e.evidence.messages.values()]
    assert len(messages) == 8 * PEERS
    assert {(m.payload, m.offset) for m in messages} == {(None, None)}
    assert not any((honest.folder / "payloads").iterdir())
    assert honest.findings == honest.replay() == []


EDITS = {
    "shorter than it can be": ({"bytes": 17}, ["17", "17616"]),
    "kept": ({"payload": "00001.bin", "offset": 0}, ["00001.bin"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_cannot_be_true_of_a_message_is_a_finding_against_the_author(name, honest, folder):
    edit, values = EDITS[name]
    edit_round(folder, 3, lambda entry: entry["messages"]["1"].update(edit))
    (finding,) = [f for f in honest.audit(folder) if f.kind == "messages"]
    assert rows([finding]) == [(3, None, "messages")] and finding.applied
    assert all(value in finding.detail for value in values)


def test_who_began_late_lacks_what_was_before_its_first_snapshot(honest, folder):
    setup, run = lab("dense").setup(honest.run), honest.run
    late = SimpleNamespace(runtime=SimpleNamespace(begins_late=True), snapshots=run.snapshots)
    setup = SimpleNamespace(run=late, start=setup.start, programs=setup.programs)
    assert _messages_since(setup, Transcript(folder)) == 0
    shutil.rmtree(folder / "snapshots/00004")
    assert _messages_since(setup, Transcript(folder)) == 8
