"""Files of a transcript that were changed, are missing or are of another run."""

import shutil

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from tests.errors import refused
from tests.pipeline.audit.bundle.bundled_run import change_json, flip_bit
from tests.pipeline.audit.edited.audited_run import edit_arrays, rows

pytestmark = pytest.mark.long


def test_a_flipped_bit_of_a_payload_is_a_finding(audited, transcript):
    flip_bit(transcript / "payloads" / "00001.bin")
    last = max(Transcript(transcript).rounds[3].evidence.messages)
    assert (4, last) in [row[:2] for row in rows(audited.audit(transcript))]


def test_rounds_that_are_missing_or_too_many_are_findings(audited, transcript):
    path = transcript / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for step, left in ((6, lines[:5]), (8, [*lines, lines[-1]])):
        path.write_text("".join(left))
        assert rows(audited.audit(transcript)) == [(step, None, "rounds")]


@pytest.mark.parametrize(
    "edit",
    [
        *(lambda s, name=name: shutil.rmtree(s / name) for name in ("00000", "00004", "00008")),
        lambda s: shutil.copytree(s / "00004", s / "00005"),
        lambda s: (s / "00004" / "params.safetensors").unlink(),  # kept as hashes only
    ],
    ids=["without the first", "without one", "without the last", "one too many", "not whole"],
)
def test_snapshots_other_than_the_run_file_asks_for_are_a_finding(audited, transcript, edit):
    edit(transcript / "snapshots")
    assert rows(audited.audit(transcript)) == [(0, None, "snapshot")]


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("name", ["params", "own-001"])
def test_a_snapshots_file_that_was_changed_is_a_finding(audited, transcript, step, name):
    edit_arrays(transcript, step, name)
    assert rows(audited.audit(transcript)) == [(step, None, "snapshot")]


def test_a_snapshots_file_that_is_missing_is_a_finding_that_names_no_machine(audited, transcript):
    (transcript / "snapshots" / "00004" / "own-001.safetensors").unlink()
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (4, "snapshot")
    assert finding.detail.startswith("snapshots/00004/own-001.safetensors: ")


@pytest.mark.parametrize(("step", "value"), [(4, np.nan), (8, np.inf)])
def test_a_state_that_is_no_number_is_a_finding_whatever_its_hash(audited, transcript, step, value):
    edit_arrays(transcript, step, "own-001", value, hashed=True)
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.peer, finding.kind) == (step, None, "snapshot")
    assert finding.detail.startswith(f"snapshots/{step:05}/own-001.safetensors: tensor ")
    assert finding.detail.endswith(f" has a value of {value}, expected numbers")


def test_another_start_than_the_auditors_is_a_finding(audited, transcript):
    edit_arrays(transcript, 0, "params", hashed=True)
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (0, "snapshot")
    assert "stage convert" in finding.detail


@pytest.mark.parametrize("part", ["run", "model"])
def test_a_header_that_tells_of_another_run_is_a_finding(audited, transcript, part):
    change_json(transcript / "header.json", lambda header: header[part].update(rms_norm_eps=1.0))
    assert [f.kind for f in audited.audit(transcript)] == ["header"]


@pytest.mark.parametrize("machine", ["this one", "another"])  # merges go by rules on any
def test_params_that_do_not_follow_are_a_finding_about_the_author(audited, transcript, machine):
    if machine == "another":
        other = {"device_kind": machine}
        change_json(transcript / "header.json", lambda header: header["environment"].update(other))
    edit_arrays(transcript, 8, "params", hashed=True)
    assert audited.audit(transcript) == []
    assert rows(audited.replay(transcript)) == [(8, None, "params")]


@pytest.mark.parametrize("line", ["{}", "no JSON", '{"round": {"step": "1"}}'])
def test_a_line_that_is_no_round_is_one_line_of_error(transcript, line):
    path = transcript / "rounds.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with refused("rounds.jsonl:1:"):
        _ = Transcript(transcript).rounds


@pytest.mark.parametrize(
    ("number", "reader"),
    [(2, "release 0.2"), (3, "version before release 0.3"), (7, "a later release")],
)
def test_another_format_names_the_release_that_reads_it(number, reader, transcript):
    change_json(transcript / "header.json", lambda header: header.update(format=number))
    with pytest.raises(LockstepError, match=f"format {number}, expected 4; .*{reader} reads it"):
        _ = Transcript(transcript).header
