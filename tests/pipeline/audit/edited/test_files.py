"""Files of a transcript that were changed, are missing or are of another run."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import load_nested, tree_hash
from tests.errors import refused
from tests.lockstep.swarm.simulated import lab
from tests.pipeline.audit.edited.audited_run import edit_arrays, record

pytestmark = pytest.mark.long


def test_a_flipped_bit_of_a_payload_is_a_finding(audited, transcript):
    path = transcript / "payloads" / "00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    last = max(Transcript(transcript).rounds[3].evidence.messages)
    assert (4, last) in [(f.round, f.peer) for f in audited.audit(transcript)]


def test_rounds_that_are_missing_or_too_many_are_findings(audited, transcript):
    path = transcript / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(6, "rounds")]
    path.write_text("".join([*lines, lines[-1]]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(8, "rounds")]


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
    found = [(f.round, f.peer, f.kind) for f in audited.audit(transcript)]
    assert found == [(0, None, "snapshot")]


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("name", ["params", "own-001"])
def test_a_snapshots_file_that_was_changed_is_a_finding(audited, transcript, step, name):
    edit_arrays(transcript, step, name)
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(step, "snapshot")]


def test_a_snapshots_file_that_is_missing_is_a_finding_that_names_no_machine(audited, transcript):
    (transcript / "snapshots" / "00004" / "own-001.safetensors").unlink()
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (4, "snapshot")
    assert finding.detail.startswith("snapshots/00004/own-001.safetensors: ")


@pytest.mark.parametrize(("step", "value"), [(4, np.nan), (8, np.inf)])
def test_a_state_that_is_no_number_is_a_finding_whatever_its_hash(audited, transcript, step, value):
    edit_arrays(transcript, step, "own-001", value)
    own = load_nested(transcript / "snapshots" / f"{step:05}" / "own-001.safetensors")
    record(transcript, step, lambda recorded: recorded["own"].__setitem__(1, tree_hash(own)))
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.peer, finding.kind) == (step, None, "snapshot")
    assert finding.detail.startswith(f"snapshots/{step:05}/own-001.safetensors: tensor ")
    assert finding.detail.endswith(f" has a value of {value}, expected numbers")


def test_another_start_than_the_auditors_is_a_finding(audited, transcript):
    edit_arrays(transcript, 0, "params")
    params, _ = Transcript(transcript).agreed(0, lab("signs").begin.state)
    record(transcript, 0, lambda recorded: recorded.update(params=tree_hash(params)))
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (0, "snapshot")
    assert "stage convert" in finding.detail


@pytest.mark.parametrize("part", ["run", "model"])
def test_a_header_that_tells_of_another_run_is_a_finding(audited, transcript, part):
    header = read_json(transcript / "header.json")
    header[part] = header[part] | {"rms_norm_eps": 1.0}
    (transcript / "header.json").write_text(json.dumps(header))
    assert [f.kind for f in audited.audit(transcript)] == ["header"]


@pytest.mark.parametrize("machine", ["this one", "another"])  # merges go by rules on any
def test_params_that_do_not_follow_are_a_finding_about_the_author(audited, transcript, machine):
    header = read_json(transcript / "header.json")
    if machine == "another":
        header["environment"]["device_kind"] = machine
        (transcript / "header.json").write_text(json.dumps(header))
    path = transcript / "snapshots" / "00008" / "params.safetensors"
    arrays = {name: value * 1.5 for name, value in load_file(path).items()}
    path.unlink()
    save_file(arrays, path)
    params, _ = Transcript(transcript).agreed(8, lab("signs").begin.state)
    record(transcript, 8, lambda recorded: recorded.update(params=tree_hash(params)))
    assert audited.audit(transcript) == []
    found = [(f.round, f.peer, f.kind) for f in audited.replay(transcript)]
    assert found == [(8, None, "params")]


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
    header = read_json(transcript / "header.json") | {"format": number}
    (transcript / "header.json").write_text(json.dumps(header))
    with pytest.raises(LockstepError, match=f"format {number}, expected 4; .*{reader} reads it"):
        _ = Transcript(transcript).header
