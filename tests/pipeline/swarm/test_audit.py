"""The audit and the replay find whatever differs from an honest run, and say whose it is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import config, start, tokens
from pipeline.artifacts import Paths, read_json
from pipeline.errors import LockstepError
from pipeline.swarm import wire
from pipeline.swarm.audit import Finding, audit
from pipeline.swarm.commitment import tree_hash
from pipeline.swarm.replay import Replay, Window
from pipeline.swarm.transcript import Transcript
from pipeline.train_step import Programs
from tests import tiny


class Audited:
    """A finished tiny run of 6 rounds and 2 peers, snapshots after 0, 3 and 6; and its auditor."""

    def __init__(self, run_file: Path, root: Path):
        paths = Paths("witness", run_file, root)
        self.run = config.load(run_file)
        init, shards = paths.need("convert"), paths.need("download")
        self.hf_config = read_json(init / "hf" / "config.json")
        self.programs = Programs(self.run, self.hf_config)
        self.begin = start.read(init, self.run, self.programs)
        self.form = wire.form_of(self.programs.optimizer, self.begin.state.params, "lockstep")
        self.data = tokens.open_shards(shards, "train", self.run.llm.max_seq_len)
        self.folder = paths.out("train") / "transcript"

    def audit(self, folder: Path) -> list[Finding]:
        transcript = Transcript(folder)
        return audit(self.run, self.hf_config, transcript, self.form, self.begin)

    def replay(self, folder: Path, bitwise: bool = True) -> list[Finding]:
        transcript = Transcript(folder)
        replay = Replay(
            self.run, self.programs, transcript, self.data, self.form, self.begin.state, bitwise
        )
        windows = [Window(*steps) for steps in transcript.windows()]
        return [f for window in windows for f in replay.window(window, [0, 1], lambda: None)]


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Audited:
    folder = tmp_path_factory.mktemp("audited")
    run_file, root = folder / "run.toml", folder / "root"
    tiny.write_run(run_file, tiny.run_document(tiny.write_data(folder / "tokens")))
    tiny.by_hand(run_file, root, "download", "convert", "train")
    return Audited(run_file, root)


@pytest.fixture
def transcript(audited, tmp_path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(audited.folder, tmp_path / "transcript")


def edit_round(folder: Path, step: int, edit) -> None:
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    entry = json.loads(lines[step - 1])
    edit(entry)
    lines[step - 1] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")


def edit_arrays(folder: Path, step: int, name: str) -> None:
    """Changes one number of a snapshot's file, and leaves its recorded hash."""
    path = folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
    arrays = load_file(path)
    first = sorted(arrays)[0]
    arrays[first] = arrays[first].copy()
    arrays[first].flat[0] += 1
    path.unlink()  # a hard link may stand elsewhere
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, path)


def record(folder: Path, step: int, edit) -> None:
    path = folder / "snapshots" / f"{step:05}" / "state.json"
    recorded = json.loads(path.read_text())
    edit(recorded)
    path.write_text(json.dumps(recorded))


def test_an_honest_transcript_has_no_findings(audited):
    assert audited.audit(audited.folder) == []
    assert audited.replay(audited.folder) == []
    assert audited.replay(audited.folder, bitwise=False) == []


@pytest.mark.parametrize(
    ("step", "peer", "kind", "tamper"),
    [
        (4, None, "assignment", lambda e: e["round"]["assignment"].update({"0": [0, 0]})),
        (4, None, "assignment", lambda e: e["round"].update(seed=1)),
        (4, None, "messages", lambda e: e["messages"].pop("1")),
        (4, None, "arrivals", lambda e: e["arrivals"].update({"1": 9.0})),
        (4, None, "decision", lambda e: e["decision"].update(applied=[0])),
        (4, None, "decision", lambda e: e["decision"].update(now=0.0)),
        (4, 1, "commitment", lambda e: e["messages"]["1"].update(commitment="00" * 32)),
        (4, 1, "payload", lambda e: e["messages"]["1"].update(payload="00009.bin")),
        (4, 1, "payload", lambda e: e["messages"]["1"].update(payload=None)),
        (4, 1, "payload", lambda e: e["messages"]["1"].update(offset=1)),
    ],
)
def test_an_edited_round_is_a_finding(audited, transcript, step, peer, kind, tamper):
    edit_round(transcript, step, tamper)
    found = [(f.round, f.peer, f.kind) for f in audited.audit(transcript)]
    assert (step, peer, kind) == found[0]


def test_a_peers_message_in_anothers_place_is_a_finding(audited, transcript):
    def swap(entry: dict) -> None:
        first, second = (entry["messages"][peer] for peer in ("0", "1"))
        for name in ("offset", "bytes"):
            first[name], second[name] = second[name], first[name]

    edit_round(transcript, 2, swap)
    found = [(f.round, f.peer, f.kind) for f in audited.audit(transcript)]
    assert (2, 0, "commitment") in found and (2, 1, "commitment") in found


def test_a_flipped_bit_of_a_payload_is_a_finding(audited, transcript):
    path = transcript / "payloads" / "00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert [(f.round, f.peer) for f in audited.audit(transcript)] == [(3, 1)]


def test_rounds_that_are_missing_or_too_many_are_findings(audited, transcript):
    path = transcript / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(6, "rounds")]
    path.write_text("".join([*lines, lines[-1]]))
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(6, "rounds")]


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_snapshot_that_is_missing_is_a_finding(audited, transcript, step):
    shutil.rmtree(transcript / "snapshots" / f"{step:05}")
    assert [f.kind for f in audited.audit(transcript)] == ["snapshot"]


def test_a_snapshot_too_many_is_a_finding(audited, transcript):
    shutil.copytree(transcript / "snapshots" / "00003", transcript / "snapshots" / "00004")
    assert [f.kind for f in audited.audit(transcript)] == ["snapshot"]


@pytest.mark.parametrize("step", [0, 3, 6])
@pytest.mark.parametrize("name", ["params", "own-001"])
def test_a_snapshots_file_that_was_changed_is_a_finding(audited, transcript, step, name):
    edit_arrays(transcript, step, name)
    assert [(f.round, f.kind) for f in audited.audit(transcript)] == [(step, "snapshot")]


def test_a_snapshots_file_that_is_missing_is_a_finding_that_names_no_machine(audited, transcript):
    (transcript / "snapshots" / "00003" / "own-001.safetensors").unlink()
    (finding,) = audited.audit(transcript)
    assert (finding.round, finding.kind) == (3, "snapshot")
    assert finding.detail.startswith("snapshots/00003/own-001.safetensors: ")


def test_another_start_than_the_auditors_is_a_finding(audited, transcript):
    edit_arrays(transcript, 0, "params")
    params = Transcript(transcript).state(0, audited.begin.state).params
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


def test_a_state_that_does_not_follow_names_the_peer_and_the_window_that_ends_in_it(
    audited, transcript
):
    edit_arrays(transcript, 3, "own-001")
    own = Transcript(transcript).state(3, audited.begin.state).own[1]
    record(transcript, 3, lambda recorded: recorded["own"].__setitem__(1, tree_hash(own)))
    assert audited.audit(transcript) == []
    found = [(f.round, f.peer, f.kind) for f in audited.replay(transcript)]
    assert found[0] == (3, 1, "state")


@pytest.mark.parametrize("bitwise", [True, False])
def test_params_that_do_not_follow_are_a_finding_about_the_author(audited, transcript, bitwise):
    path = transcript / "snapshots" / "00006" / "params.safetensors"
    arrays = {name: value * 1.5 for name, value in load_file(path).items()}
    path.unlink()
    save_file(arrays, path)
    params = Transcript(transcript).state(6, audited.begin.state).params
    record(transcript, 6, lambda recorded: recorded.update(params=tree_hash(params)))
    assert audited.audit(transcript) == []
    found = [(f.round, f.peer, f.kind) for f in audited.replay(transcript, bitwise)]
    assert found == [(6, None, "params")]


@pytest.mark.parametrize("line", ["{}", "no JSON", '{"round": {"step": "1"}}'])
def test_a_line_that_is_no_round_is_one_line_of_error(transcript, line):
    path = transcript / "rounds.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(LockstepError, match=r"rounds.jsonl:1: ") as raised:
        _ = Transcript(transcript).rounds
    assert "\n" not in str(raised.value)


def test_another_format_names_the_release_that_reads_it(transcript):
    header = read_json(transcript / "header.json") | {"format": 7}
    (transcript / "header.json").write_text(json.dumps(header))
    with pytest.raises(LockstepError, match="format 7, expected 1; release later than this one"):
        _ = Transcript(transcript).header
