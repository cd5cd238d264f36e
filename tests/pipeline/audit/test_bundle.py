"""A bundle: enough for a third party to repeat a replay, and of no use to blame anybody else."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from pipeline import runfile
from pipeline.__main__ import app
from pipeline.audit import bundle, given_bundle, rerun_bundle
from pipeline.errors import LockstepError
from pipeline.stage.artifacts import read_json, write_json
from pipeline.stage.keys import PROJECT, RUN_FILE
from pipeline.weights.trees import load_nested, save_tree
from tests import tiny

FLIP = {"kind": "sign_flip", "peer": 1, "rounds": [2, 3]}
OPENING = "transcript/snapshots/00000"


def bundles(folder: Path, **changes: object) -> tuple[dict, dict[str, Path]]:
    """Trains and audits a run; leaves its verdict and, elsewhere, its bundles, and nothing else."""
    run_file, root, kept = folder / "run.toml", folder / "root", folder / "elsewhere"
    tiny.write_run(run_file, tiny.run_document(tiny.write_data(folder / "tokens"), **changes))
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    verdict = read_json(root / "data/verdict/verdict.json")
    shutil.copytree(root / "data/verdict/bundles", kept)
    for gone in (root, folder / "tokens"):
        shutil.rmtree(gone)
    return verdict, {path.name: path for path in sorted(kept.iterdir())}


@pytest.fixture(scope="module")
def flipped(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """One of two peers sends the negative of its message, and nobody verifies."""
    return bundles(tmp_path_factory.mktemp("flipped"), faults__schedule=[FLIP])


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """The same, and messages are not kept."""
    changes = {"faults__schedule": [FLIP], "model__LLM__optimizer": tiny.ADAMW}
    return bundles(tmp_path_factory.mktemp("dense"), **changes)


@pytest.fixture(scope="module")
def verified(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """A verifier accuses an honest peer, and another peer sends what it did not commit to."""
    return bundles(
        tmp_path_factory.mktemp("verified"),
        config__verification_percent=34,
        config__min_clients=3,
        config__init_min_clients=3,
        config__global_batch_size_start=6,
        config__global_batch_size_end=6,
        peers__count=5,
        faults__schedule=[
            {"kind": "false_verifier", "peer": 0, "rounds": [1, 6]},
            {"kind": "wrong_hash", "peer": 4, "rounds": [1, 6]},
        ],
    )


@pytest.fixture(autouse=True)
def equal_runs_have_their_programs_in_common(monkeypatch):
    monkeypatch.setattr("pipeline.swarm.begin.programs_of", tiny.programs_in_common)


@pytest.fixture
def folder(flipped, tmp_path) -> Path:
    """A copy of the first bundle, to change."""
    return shutil.copytree(flipped[1]["00001-00003-peer-01"], tmp_path / "bundle")


def replay(path: Path, **environment: str) -> subprocess.CompletedProcess:
    """The command, as a third party gives it: where there is no data of the run."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "replay", path],
        cwd=path.parent,
        env=tiny.environment(PROJECT) | environment,
        capture_output=True,
        text=True,
    )


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    said = read_json(path)
    change(said)
    write_json(path, said)


def seal(folder: Path) -> None:
    """Makes bundle.json list the files as they are: whoever changes them can do that too."""
    change_json(folder / bundle.MANIFEST, lambda said: said.update(files=bundle.listing(folder)))


# ---- Repeated ----


def test_a_finding_is_confirmed_with_the_bundle_alone(flipped):
    verdict, found = flipped
    names = {finding["bundle"] for finding in verdict["findings"]}
    assert names == {f"bundles/{name}" for name in found} == {"bundles/00001-00003-peer-01"}
    done = replay(found["00001-00003-peer-01"])
    assert (done.returncode, done.stderr) == (0, "")
    (finding,) = verdict["findings"]
    assert done.stdout.splitlines() == [
        f"peer 1, round 2, message: {finding['detail']}",
        f"  found here: round 2, message: {finding['detail']}",
        "  confirmed",
        "1 of 1 findings confirmed, compared bit for bit",
    ]


def test_elsewhere_it_is_confirmed_within_a_tolerance_and_says_why(flipped):
    flags = f"{tiny.environment(PROJECT)['XLA_FLAGS']} --xla_cpu_enable_fast_math=false"
    done = replay(flipped[1]["00001-00003-peer-01"], XLA_FLAGS=flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  confirmed\n" in done.stdout
    assert "compared within a tolerance of 0.05, because xla_flags is" in done.stdout


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
    assert "transcript/payloads/00001.bin" in names  # of sketches
    assert rerun_bundle.show(path, 1) == 0
    assert "1 of 1 findings confirmed, compared bit for bit" in capsys.readouterr().out


def test_a_false_check_is_repeated_by_taking_the_step_of_the_accused(verified, capsys):
    verdict, found = verified
    (finding,) = [f for f in verdict["findings"] if f["kind"] == "check"]
    path = found[Path(finding["bundle"]).name]
    accused = finding["detail"].split()[5]
    assert f"recomputed the step of peer {accused} as" in finding["detail"] and finding["peer"] == 0
    owned = [name for name in tiny.contents(path) if "own-" in name]
    assert owned == [f"{OPENING}/own-{int(accused):03}.safetensors"]
    assert rerun_bundle.show(path, 1) == 0
    assert capsys.readouterr().out.count(finding["detail"]) == 2


def test_another_payload_than_was_committed_to_is_repeated_without_training(verified, capsys):
    verdict, found = verified
    (finding,) = [f for f in verdict["findings"] if f["kind"] == "commitment"]
    path = found[Path(finding["bundle"]).name]
    assert verdict["accepted"] and finding["peer"] == 4
    names = set(tiny.contents(path))
    assert not any("snapshots" in name for name in names) and "tokens.safetensors" not in names
    assert rerun_bundle.show(path, 1) == 0
    assert "1 of 1 findings confirmed, by decoding what was sent" in capsys.readouterr().out


# ---- Changed, by someone who seals it again ----


def change_tree(name: str, change: Callable[[dict], dict]) -> Callable[[Path], None]:
    return lambda folder: save_tree(folder / name, change(load_nested(folder / name)))


change_tokens, drop_tokens, break_tokens = (
    change_tree("tokens.safetensors", change)
    for change in (
        lambda tree: tree | {"rows": (tree["rows"] + 1) % 64},
        lambda tree: {name: rows[1:] for name, rows in tree.items()},
        lambda tree: tree | {"rows": tree["rows"] - 64},
    )
)
change_own, change_params = (
    change_tree(f"{OPENING}/{name}.safetensors", partial(jax.tree.map, lambda x: 2 * x + 1))
    for name in ("own-001", "params")
)


def change_payload(folder: Path) -> None:
    path = folder / "transcript/payloads/00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_rounds(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "transcript/rounds.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    change(entries[1])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def cut_rounds(folder: Path, count: int) -> None:
    path = folder / "transcript/rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def change_said(folder: Path, change: Callable[[dict], object]) -> None:
    change_json(folder / bundle.MANIFEST, change)


def about(**said: object) -> Callable[[Path], None]:
    """Changes what bundle.json says of itself."""
    return lambda folder: change_said(folder, lambda found: found.update(said))


def found(**said: object) -> Callable[[Path], None]:
    """Changes what bundle.json says was found."""
    return lambda folder: change_said(folder, lambda old: old["findings"][0].update(said))


def blame_the_other(folder: Path) -> None:
    """Everything that speaks of peer 1 speaks of peer 0, whose state is put in."""
    about(peer=0)(folder)
    found(peer=0)(folder)
    opening = folder / OPENING
    shutil.copy(opening / "own-001.safetensors", opening / "own-000.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_tokens, "found here: round 1, message"),
        (found(round=1), "found here: round 2, message"),
        (found(round=3), "found here: round 2, message"),
        (found(kind="state"), "found here: round 2, message"),
        (found(detail="sent 0123, its replay gives 4567"), "found here: round 2, message"),
        (found(applied=False), "found here: round 2, message"),
        (found(kind="payload"), "found here: nothing against it"),
    ],
)
def test_what_a_replay_does_not_find_is_not_confirmed(folder, change, said, capsys):
    change(folder)
    seal(folder)
    assert rerun_bundle.show(folder, 1) == 1
    out = capsys.readouterr().out
    assert said in out and "\n  not confirmed\n" in out and "0 of 1 findings" in out


def test_an_honest_peer_is_not_blamed(flipped, folder, capsys):
    # peers begin with equal states, so that of peer 1 will do: only the sequences are missing
    blame_the_other(folder)
    seal(folder)
    with pytest.raises(LockstepError, match="tokens.safetensors: without some of sequences"):
        rerun_bundle.show(folder, 1)


REFUSED = {
    "own state": (change_own, "round 0, snapshot: its files do not have the hashes"),
    "opening params": (change_params, "round 0, snapshot: its files do not have the hashes"),
    "payload": (change_payload, "transcript: round 3, peer"),
    "no payload": (
        lambda f: shutil.rmtree(f / "transcript/payloads"),
        "transcript: round 1, peer",
    ),
    "fewer tokens": (drop_tokens, "tokens.safetensors: without some of sequences"),
    "no token ids": (break_tokens, "tokens.safetensors: expected inputs from 0"),
    "another peer": (found(peer=0), "a finding of peer 0, round 2, expected of peer 1"),
    "eight bits": (
        lambda f: save_tree(
            f / "tokens.safetensors",
            {"indices": np.zeros(2, np.int64), "rows": np.zeros((2, 16), float8_e4m3fn)},
        ),
        "tokens.safetensors: expected ascending indices",
    ),
    "tensors in tensors": (
        lambda f: save_tree(f / "tokens.safetensors", {"indices": {"x": np.zeros(2)}, "rows": {}}),
        "tokens.safetensors: expected ascending indices",
    ),
    "no such peer": (about(peer=7), "peer 7, expected a peer below 2"),
    "another round": (found(round=4), "a finding of peer 1, round 4, expected"),
    "another window": (about(window=[1, 2]), "bundle.json: window [1, 2] is not one of this run's"),
    "a later window": (about(window=[4, 6]), "round 2, expected of peer 1 in rounds 4 to 6"),
    "another format": (about(format=1), "bundle.json: format is "),
    "nothing found": (about(findings=[]), "bundle.json: findings is "),
    "an unknown key": (about(code="x"), "bundle.json: code: "),
    "a broken file": (
        lambda f: (f / OPENING / "own-001.safetensors").write_bytes(b"x"),
        "own-001.safetensors: expected a safetensors file",
    ),
    "a state of others": (
        lambda f: change_json(f / OPENING / "state.json", lambda s: s["own"].pop()),
        "round 0, snapshot: state.json is of step 0 and 1 peers",
    ),
    "no hashes": (
        lambda f: (f / OPENING / "state.json").write_text("[]"),
        "round 0, snapshot: snapshots/00000/state.json: ",
    ),
    "a peer too many": (
        lambda f: change_rounds(f, lambda e: e["decision"].update(applied=[0, 1, 2])),
        "round 2, decision: does not follow from the evidence: applied",
    ),
    "a span too long": (
        lambda f: change_rounds(f, lambda e: e["round"]["assignment"].update({"1": [0, 10**12]})),
        "round 2, assignment: does not follow from the run file: assignment",
    ),
    "a payload elsewhere": (
        lambda f: change_rounds(
            f, lambda e: e["evidence"]["messages"]["1"].update(payload="../../x")
        ),
        "rounds.jsonl:2: evidence.messages.1.payload is ",
    ),
    "no payload's place": (
        lambda f: change_rounds(f, lambda e: e["evidence"]["messages"]["1"].update(payload=None)),
        "round 2, peer 1, payload: is not kept",
    ),
    "another model": (
        lambda f: change_json(f / "transcript/header.json", lambda h: h.update(model={})),
        "header.json: model_type is None",
    ),
    "a table for a format": (
        lambda f: change_json(f / "transcript/header.json", lambda h: h.update(format={"a": 1})),
        "header.json: format {'a': 1}, expected 2; a later release reads it",
    ),
    "a list for a header": (
        lambda f: (f / "transcript/header.json").write_text("[]"),
        "header.json: ",
    ),
    "a list for a run": (lambda f: (f / "run.json").write_text("[]"), "run.json: "),
    "another run file": (
        lambda f: change_json(f / "run.json", lambda r: r["peers"].update(seed=9)),
        "round 0, header: its run differs from",
    ),
    "fewer rounds": (lambda f: cut_rounds(f, 2), "round 3, rounds: the transcript ends before"),
    "no rounds": (lambda f: cut_rounds(f, 0), "bundle.json: window [1, 3] is not one of this"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_in_one_line(folder, case):
    change, said = REFUSED[case]
    change(folder)
    seal(folder)
    with pytest.raises(LockstepError) as caught:
        rerun_bundle.show(folder, 1)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ---- From a stranger ----


def put(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def make_large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(10**11)  # a hole, which takes no space


STRANGE = {
    "a pipe for the run": (put(os.mkfifo, "run.json"), "not a regular file"),
    "a pipe for the manifest": (put(os.mkfifo, "bundle.json"), "not a regular file"),
    "a pipe nobody lists": (put(os.mkfifo, "transcript/x"), "not a regular file"),
    "a link": (put(lambda path: path.symlink_to("/etc/hosts"), "run.json"), "a link to /etc"),
    "a link to a folder": (put(lambda path: path.symlink_to("/etc"), "etc"), "a link to /etc"),
    "100 GB": (put(make_large, "tokens.safetensors"), "100.0 GB, expected at most 4 GB; "),
    "too many threads": (
        lambda f: change_json(f / "run.json", lambda r: r["peers"].update(threads=3000)),
        "peers.threads is 3000, expected a number less than or equal to 1024",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_could_harm_the_machine_is_refused_before_it_is_opened(tmp_path, case):
    change, said = STRANGE[case]
    write_json(tmp_path / "run.json", runfile.load(PROJECT / RUN_FILE).model_dump(mode="json"))
    (tmp_path / "transcript").mkdir()
    assert given_bundle.read_run(tmp_path, 4).peers.threads == 4
    change(tmp_path)
    with pytest.raises(LockstepError, match=re.escape(said)):
        given_bundle.read_run(tmp_path, 4)


def test_the_sender_of_a_bundle_does_not_say_how_much_memory_there_is(tmp_path):
    run = runfile.load(PROJECT / RUN_FILE).model_dump(mode="json")
    run["runtime"]["memory_gb"] = 1e9
    write_json(tmp_path / "run.json", run)
    assert given_bundle.read_run(tmp_path, 4).runtime.memory_gb is None


def test_the_files_of_a_bundle_are_checked_before_jax_is_imported():
    code = "import sys, pipeline.audit.given_bundle; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# ---- Changed on the way ----


@pytest.mark.parametrize(
    "name", ["tokens.safetensors", "run.json", f"{OPENING}/own-001.safetensors"]
)
def test_every_file_is_checked_against_its_hash(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(LockstepError, match=f"{name}.: found .*, expected .* as bundle.json says"):
        rerun_bundle.read(folder, 1)


def test_files_that_are_missing_or_too_many_are_named(folder):
    for name, said in (
        ("x\x1b", r"lists a file named 'x\\x1b', expected a path inside it"),
        ("x", r"'x': found e3b0c44298fc, expected no file"),
    ):
        (folder / name).touch()
        with pytest.raises(LockstepError, match=said):
            rerun_bundle.read(folder, 1)
        (folder / name).unlink()
    (folder / "tokens.safetensors").unlink()
    with pytest.raises(LockstepError, match=r"tokens.safetensors': found no file, expected"):
        rerun_bundle.read(folder, 1)


def test_the_command_exits_with_one_where_a_finding_is_not_confirmed(folder, capsys):
    found(round=1)(folder)
    seal(folder)
    with tiny.like_a_process(), pytest.raises(SystemExit) as caught:
        app(["replay", str(folder)])
    printed = capsys.readouterr()
    assert (caught.value.code, printed.err) == (1, "")
    assert "  not confirmed" in printed.out.splitlines()


def test_no_bundle_is_one_line(tmp_path):
    done = replay(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"error: {tmp_path}/run.json: No such file or directory, expected a JSON file\n"
    )


def test_a_name_tells_the_rounds_and_the_peer():
    assert bundle.name(runfile.Window(51, 100), 2) == "bundles/00051-00100-peer-02"
